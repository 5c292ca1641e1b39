//! [`DdpStrategy`]: the process group of a training and its options.

use burn::tensor::backend::Backend;

use crate::data::Uneven;
use crate::process_group::ProcessGroup;
use crate::replica::{BufferSync, ReplicaOptions};

/// Default limit on the outputs that are gathered in one micro-step: 64 MiB over all ranks.
const OUTPUT_LIMIT: usize = 64 << 20;

/// Process group and options of a training by [`launch_ddp`](super::LaunchDdp::launch_ddp); all ranks give equal
/// options.
///
/// ```no_run
/// use burn_ddp::data::Uneven;
/// use burn_ddp::learner::{DdpStrategy, IncompleteWindow};
/// use burn_ddp::{ProcessGroup, ReplicaOptions};
///
/// # fn options<B: burn::tensor::backend::Backend>(group: &ProcessGroup<B>) -> DdpStrategy<B> {
/// DdpStrategy::new(group)
///     .with_replica(ReplicaOptions::new())
///     .with_seed(42)
///     .with_incomplete_window(IncompleteWindow::Drop)
///     .with_uneven(Uneven::Truncate)
/// # }
/// ```
#[derive(Clone)]
pub struct DdpStrategy<G: Backend> {
    pub(super) group: ProcessGroup<G>,
    pub(super) options: Options,
}

#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) replica: ReplicaOptions,
    pub(super) seed: u64,
    pub(super) window: IncompleteWindow,
    pub(super) uneven: Uneven,
    pub(super) policy: BufferPolicy,
    pub(super) buffers: BufferSync,
    pub(super) output_limit: usize,
    pub(super) signals: bool,
}

/// Treatment of an accumulation window that the end of an epoch leaves incomplete. Its gradients never reach the next
/// epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IncompleteWindow {
    /// The micro-steps of the window make an optimizer step, with their number as the divisor.
    #[default]
    Flush,
    /// The gradients are dropped, and the learning rate schedule does not advance.
    Drop,
}

/// Time at which running states (of batch normalization) are made equal on all ranks. They are never reduced as
/// gradients, and no forward pass communicates for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BufferPolicy {
    /// Never: each rank keeps its own, and files hold rank 0's.
    Never,
    /// After every optimizer step.
    EveryStep,
    /// After the training part of each epoch, that is before validation and checkpoint.
    #[default]
    BeforeEvaluation,
}

impl<G: Backend> DdpStrategy<G> {
    /// Training on the ranks of `group`, with the default of every option.
    pub fn new(group: &ProcessGroup<G>) -> Self {
        let options = Options {
            replica: ReplicaOptions::new(),
            seed: 0,
            window: IncompleteWindow::default(),
            uneven: Uneven::default(),
            policy: BufferPolicy::default(),
            buffers: BufferSync::Average,
            output_limit: OUTPUT_LIMIT,
            signals: true,
        };
        Self { group: group.clone(), options }
    }

    fn with(mut self, change: impl FnOnce(&mut Options)) -> Self {
        change(&mut self.options);
        self
    }

    /// Sets bucket size, clipping, strict mode and checks of the [`Replica`](crate::Replica); default
    /// [`ReplicaOptions::new`].
    pub fn with_replica(self, replica: ReplicaOptions) -> Self {
        self.with(|options| options.replica = replica)
    }

    /// Sets the seed of the random streams (dropout, noise) of ranks other than 0; default 0. The streams differ
    /// between ranks and are the same in every run. Rank 0 keeps the stream of the program.
    pub fn with_seed(self, seed: u64) -> Self {
        self.with(|options| options.seed = seed)
    }

    /// Sets the treatment of an incomplete accumulation window; default [`IncompleteWindow::Flush`].
    pub fn with_incomplete_window(self, window: IncompleteWindow) -> Self {
        self.with(|options| options.window = window)
    }

    /// Sets the treatment of ranks with different numbers of batches in training; default [`Uneven::Join`].
    pub fn with_uneven(self, uneven: Uneven) -> Self {
        self.with(|options| options.uneven = uneven)
    }

    /// Sets when and how running states are made equal; default [`BufferPolicy::BeforeEvaluation`] and
    /// [`BufferSync::Average`].
    pub fn with_buffers(self, policy: BufferPolicy, how: BufferSync) -> Self {
        self.with(|options| {
            options.policy = policy;
            options.buffers = how;
        })
    }

    /// Sets the largest number of bytes of outputs that are gathered in one micro-step, over all ranks; default 64 MiB.
    /// Each rank may send an equal share of it. Above the limit only the loss is global, and a metric that needs more
    /// of the output is an error that names it.
    pub fn with_output_limit(self, bytes: usize) -> Self {
        self.with(|options| options.output_limit = bytes)
    }

    /// With `true` (default), SIGINT and SIGTERM stop the training on all ranks after the same micro-step, and a second
    /// signal ends the process. With `false`, signals keep their effect.
    ///
    /// Handlers that the program registers before its first launch are called as well. A handler that it registers
    /// later cannot keep a signal from ending the process while no launch runs.
    pub fn with_signals(self, stop: bool) -> Self {
        self.with(|options| options.signals = stop)
    }

    /// The group on whose ranks the learner is trained.
    pub fn group(&self) -> &ProcessGroup<G> {
        &self.group
    }
}
