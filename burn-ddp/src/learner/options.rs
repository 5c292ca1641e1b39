//! What the strategy does besides training, and over which group.

use burn::tensor::backend::Backend;

use crate::data::Uneven;
use crate::process_group::ProcessGroup;
use crate::replica::{BufferSync, ReplicaOptions};

/// Largest number of bytes of outputs that are gathered in a micro-step, over all ranks.
const OUTPUT_LIMIT: usize = 64 << 20;

/// How a learner is trained on all ranks of a group; give it to [`launch_ddp`](super::LaunchDdp::launch_ddp), equal
/// on all ranks.
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

/// What becomes of an accumulation window that the end of an epoch leaves incomplete. Nothing of it reaches the next
/// epoch either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IncompleteWindow {
    /// An optimizer step is made of the micro-steps there are, with their number as the divisor.
    #[default]
    Flush,
    /// Its gradients are dropped, and the learning rate schedule does not move for it.
    Drop,
}

/// When running states (of batch normalization) are made equal on all ranks. They are never reduced as gradients, and
/// no forward pass communicates for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BufferPolicy {
    /// Each rank keeps its own; the files hold rank 0's.
    Never,
    /// After every optimizer step.
    EveryStep,
    /// Before validation, which is before a checkpoint too, and at the end.
    #[default]
    BeforeEvaluation,
}

impl<G: Backend> DdpStrategy<G> {
    /// Training on the ranks of `group`, with defaults for everything else.
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

    /// Clipping, bucket size, strict mode and checks, as for a loop of one's own.
    pub fn with_replica(self, replica: ReplicaOptions) -> Self {
        self.with(|options| options.replica = replica)
    }

    /// Seed from which ranks other than 0 draw their random stream (dropout, noise): different on every rank and
    /// the same in every run. Rank 0 goes on with the stream of the program. Default 0.
    pub fn with_seed(self, seed: u64) -> Self {
        self.with(|options| options.seed = seed)
    }

    /// What becomes of an incomplete accumulation window; default [`IncompleteWindow::Flush`].
    pub fn with_incomplete_window(self, window: IncompleteWindow) -> Self {
        self.with(|options| options.window = window)
    }

    /// What happens when ranks have different numbers of batches; default [`Uneven::Join`].
    pub fn with_uneven(self, uneven: Uneven) -> Self {
        self.with(|options| options.uneven = uneven)
    }

    /// When and how running states are made equal; default before evaluation, by their average.
    pub fn with_buffers(self, policy: BufferPolicy, how: BufferSync) -> Self {
        self.with(|options| {
            options.policy = policy;
            options.buffers = how;
        })
    }

    /// Most bytes of outputs that are gathered in one micro-step, over all ranks, of which each rank has an equal part;
    /// default 64 MiB. Above it only the loss is global, and other metrics of the output are refused by name.
    pub fn with_output_limit(self, bytes: usize) -> Self {
        self.with(|options| options.output_limit = bytes)
    }

    /// Whether SIGINT and SIGTERM stop the training at the next step, on all ranks at the same one (default); a
    /// second signal ends the process. Handlers that the program registered before the first launch are called as well;
    /// one that it registers later comes too late to keep a signal from ending the process when no launch runs.
    /// Otherwise (`false`) signals do what they do without us.
    pub fn with_signals(self, stop: bool) -> Self {
        self.with(|options| options.signals = stop)
    }

    /// The group it trains on.
    pub fn group(&self) -> &ProcessGroup<G> {
        &self.group
    }
}
