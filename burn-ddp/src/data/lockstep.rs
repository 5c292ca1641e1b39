//! Ranks that walk their data in step, whatever length it has.
//!
//! A rank that runs out of data and leaves its loop lets the others wait for ever in the next reduction, and no
//! loader can prevent that: streams have no length, filters drop batches, a batch fails. So before each turn the
//! ranks tell each other what they hold. Looking one batch ahead makes the last turn known while it is under way,
//! in time for the flush of an accumulation window.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn::tensor::backend::Backend;
use serde::{Deserialize, Serialize};

use super::shards::Shards;
use crate::error::{Error, ErrorKind, Result};
use crate::process_group::ProcessGroup;
use crate::rank::Rank;

/// What happens when some ranks have more batches than others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Uneven {
    /// All data are used: ranks that have run out go on without a batch, joining each reduction with
    /// [`MicroStep::empty`](crate::MicroStep::empty). Weigh micro-steps by their items.
    #[default]
    Join,
    /// All ranks end with the first that runs out; what others hold is left.
    Truncate,
}

/// Keeps all ranks at the same batch of their iterators.
///
/// Each call of [`Lockstep::next`] is one small collective (none in a world of one) that all ranks make, so they
/// take the same number of turns:
///
/// ```
/// use burn::data::dataloader::DataLoader;
/// use burn::optim::{GradientsParams, Optimizer, SgdConfig};
/// use burn_ddp::data::{Lockstep, Uneven};
/// use burn_ddp::{MicroStep, ProcessGroup, Replica, ReplicaOptions};
/// # use burn::module::{AutodiffModule, Module};
/// # use burn::nn::Linear;
/// # use burn::tensor::{Tensor, backend::AutodiffBackend};
/// # fn train<B: AutodiffBackend>(
/// #     mut model: Linear<B>,
/// #     mut replica: Replica<B>,
/// #     loader: std::sync::Arc<dyn DataLoader<B, Tensor<B, 2>>>,
/// #     group: ProcessGroup<B::InnerBackend>,
/// # ) -> burn_ddp::Result<()> {
/// # let mut optimizer = SgdConfig::new().init();
/// for epoch in 0..10 {
///     let mut lockstep = Lockstep::new(loader.iter(), &group, Uneven::Join);
///     while let Some(turn) = lockstep.next(false)? {
///         let micro_step = match turn.batch {
///             Some(batch) => {
///                 let loss = model.forward(batch).mean();
///                 let grads = GradientsParams::from_grads(loss.backward(), &model);
///                 MicroStep::new(grads).with_loss(loss).with_weight(turn.items as f64)
///             }
///             None => MicroStep::empty(),
///         };
///         let reduced = replica.reduce(&model, micro_step)?;
///         model = optimizer.step(0.1, model, reduced.grads);
///     }
/// }
/// # Ok(())
/// # }
/// ```
///
/// It holds one batch more than it has handed out.
pub struct Lockstep<'a, G: Backend, O> {
    iterator: Box<dyn DataLoaderIterator<O> + 'a>,
    group: ProcessGroup<G>,
    uneven: Uneven,
    /// Whether a batch is taken ahead.
    ahead: bool,
    /// Whether a batch without items is a placeholder, and not one of an iterator that does not count.
    placeholders: bool,
    /// The batch after the turn that was handed out; before the first turn nothing is held.
    following: Option<Held<O>>,
    begun: bool,
    /// The iterator has ended.
    dry: bool,
    over: bool,
    failed: Option<Error>,
    /// What is behind a panic with this message, where somebody knows.
    explain: Box<Explain<'a>>,
    /// This rank's progress up to the turn that was handed out.
    progress: (usize, usize),
}

/// A batch that was taken from the iterator.
struct Held<O> {
    batch: O,
    items: usize,
    progress: (usize, usize),
}

/// From the message of a panic to what is behind it.
type Explain<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// What all ranks do next.
#[derive(Debug)]
pub struct Turn<O> {
    /// This rank's batch; `None` when it has run out and others have not.
    pub batch: Option<O>,
    /// Items of this rank's batch by the count of its loader, the weight of its micro-step: 0 without a batch and
    /// for a placeholder. Batches of an iterator that never counts are one item each.
    pub items: usize,
    /// Items of all ranks' batches.
    pub items_all: usize,
    /// Whether this is the last turn, on all ranks.
    pub last: bool,
    /// Whether some rank asked to stop; the turn is the last one then.
    pub stop: bool,
    /// Items of all ranks up to and with this turn, and in total as far as loaders know.
    pub progress: Progress,
}

/// What a rank tells the others before each turn.
#[derive(Serialize, Deserialize)]
struct Report {
    uneven: Uneven,
    current: bool,
    following: bool,
    items: usize,
    processed: usize,
    total: usize,
    stop: bool,
}

impl<'a, G: Backend, O> Lockstep<'a, G, O> {
    /// Walks `iterator` in step with those of the other ranks of `group`, which may be of any length.
    pub fn new(
        iterator: Box<dyn DataLoaderIterator<O> + 'a>,
        group: &ProcessGroup<G>,
        uneven: Uneven,
    ) -> Self {
        Self {
            iterator,
            group: group.clone(),
            uneven,
            ahead: true,
            placeholders: group.ranks().attached::<Shards>().any_places(),
            following: None,
            begun: false,
            dry: false,
            over: false,
            failed: None,
            explain: Box::new(|_| None),
            progress: (0, 0),
        }
    }

    /// Asks `explain` what is behind a panic of the iterator: threads of Burn's loaders keep the cause of theirs.
    pub(crate) fn explained_by(self, explain: impl Fn(&str) -> Option<String> + 'a) -> Self {
        Self { explain: Box::new(explain), ..self }
    }

    /// In a world of one takes no batch ahead, so that batches and steps draw from a common random stream in the
    /// order of the plain loop. The last turn then is not known as such.
    pub(crate) fn without_looking_ahead(self) -> Self {
        Self { ahead: self.group.world_size() > 1, ..self }
    }

    /// The next turn, the same on all ranks, or `None` on all ranks when there is none. With `stop` on any rank the
    /// turn that comes back is the last one. All ranks must call it.
    ///
    /// # Errors
    /// [`ErrorKind::Program`] when the iterator panics, with its message, or ends before the total that its
    /// [`progress`](DataLoaderIterator::progress) states (which is what Burn's loaders do when `Dataset::get`
    /// returns `None` below `len()`); the other ranks get it as the failure of this one. Any error of the group.
    pub fn next(&mut self, stop: bool) -> Result<Option<Turn<O>>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.turn(stop).inspect_err(|error| {
            self.group.fail(error);
            self.failed = Some(error.clone());
        })
    }

    fn turn(&mut self, stop: bool) -> Result<Option<Turn<O>>> {
        if self.over {
            return Ok(None);
        }
        if !self.ahead || !self.begun {
            self.begun = true;
            self.following = self.take()?;
        }
        let current = self.following.take();
        if self.ahead {
            self.following = self.take()?;
        }
        self.progress = current.as_ref().map_or(self.progress, |held| held.progress);
        let items = current.as_ref().map_or(0, |held| held.items);
        let (processed, total) = self.progress;
        let reports = self.exchange(Report {
            uneven: self.uneven,
            current: current.is_some(),
            following: self.following.is_some(),
            items,
            processed,
            total: total.max(processed),
            stop,
        })?;
        let agreed = |has: fn(&Report) -> bool| match self.uneven {
            Uneven::Join => reports.iter().any(has),
            Uneven::Truncate => reports.iter().all(has),
        };
        let stop = reports.iter().any(|report| report.stop);
        self.over = stop || (self.ahead && !agreed(|report| report.following));
        if !agreed(|report| report.current) {
            self.over = true;
            return Ok(None);
        }
        let sum = |value: fn(&Report) -> usize| reports.iter().map(value).sum();
        Ok(Some(Turn {
            batch: current.map(|held| held.batch),
            items,
            items_all: sum(|report| report.items),
            last: self.over,
            stop,
            progress: Progress::new(sum(|report| report.processed), sum(|report| report.total)),
        }))
    }

    /// Takes the next batch from the iterator.
    fn take(&mut self) -> Result<Option<Held<O>>> {
        if self.dry {
            return Ok(None);
        }
        let iterator = &mut self.iterator;
        let taken = catch_unwind(AssertUnwindSafe(|| {
            let before = iterator.progress().items_processed;
            let batch = iterator.next();
            (before, batch, iterator.progress())
        }));
        let rank = self.group.rank();
        let (before, batch, progress) = taken.map_err(|payload| {
            let error = Error::panicked(format!("the data loader of {rank}"), &*payload);
            match (self.explain)(&error.to_string()) {
                Some(cause) => Error::new(error.kind(), format!("{error}: {cause}")),
                None => error,
            }
        })?;
        let (processed, total) = (progress.items_processed, progress.items_total);
        let Some(batch) = batch else {
            self.dry = true;
            return match total > processed {
                false => Ok(None),
                true => Err(Error::new(
                    ErrorKind::Program,
                    format!(
                        "the data loader of {rank} ended after {processed} of {total} items: does Dataset::get \
                         return None below len()?"
                    ),
                )),
            };
        };
        let items = match processed {
            0 if !self.placeholders => 1,
            _ => processed.saturating_sub(before),
        };
        Ok(Some(Held { batch, items, progress: (processed, total) }))
    }

    fn exchange(&self, mine: Report) -> Result<Vec<Report>> {
        if self.group.world_size() == 1 {
            return Ok(vec![mine]);
        }
        let bytes = postcard::to_stdvec(&mine)
            .map_err(|error| Error::with_source(ErrorKind::Io, "cannot encode a message", error))?;
        let all = self.group.all_gather_bytes(bytes)?;
        let reports = all.iter().map(|bytes| postcard::from_bytes(bytes)).collect::<Result<Vec<Report>, _>>();
        let reports = reports.map_err(|error| {
            Error::with_source(ErrorKind::Mismatch, "a rank sent a message of another version", error)
        })?;
        match (1..reports.len()).find(|rank| reports[*rank].uneven != reports[0].uneven) {
            None => Ok(reports),
            Some(other) => Err(self.group.barrier_then(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "uneven data: rank 0 has {:?}, {} has {:?}; give all the same",
                    reports[0].uneven,
                    Rank(other),
                    reports[other].uneven
                ),
            ))),
        }
    }
}
