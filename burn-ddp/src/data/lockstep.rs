//! Iteration in step on all ranks, over data of any length.
//!
//! A rank that runs out of data and leaves its loop lets the others wait for ever in the next reduction. No loader can
//! prevent that: streams have no length, filters drop batches, a batch fails. So the ranks exchange a [`Report`] before
//! each round, in which each rank has at most one batch:
//!
//! ```text
//! iterator -> `following` (one batch ahead) -> current batch
//! all ranks: { has current, has following, items, progress, stop } --all_gather--> the same decision on all ranks
//!   no rank has a current batch (Truncate: some rank has none)     -> None, the end
//!   no rank has a following batch, or some rank requests a stop    -> the last round
//! ```
//!
//! The batch ahead makes the last round known as such in time to flush an incomplete accumulation window.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn::tensor::backend::Backend;
use burn_ddp_comm::{Error, ErrorKind, Rank, Result};
use serde::{Deserialize, Serialize};

use super::shards::Shards;
use crate::process_group::ProcessGroup;

/// Treatment of ranks that have more batches than others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Uneven {
    /// All data are used: ranks that have run out continue without a batch and take part in each reduction with
    /// [`MicroStep::empty`](crate::MicroStep::empty). Weigh micro-steps by their items.
    #[default]
    Join,
    /// All ranks end with the first that runs out; the remaining data of the others are not used.
    Truncate,
}

/// Iterator over the batches of this rank that takes the same number of rounds on all ranks.
///
/// Each call of [`Lockstep::next`] is one small collective (none in a world of one), which all ranks call:
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
///     while let Some(round) = lockstep.next(false)? {
///         let micro_step = match round.batch {
///             Some(batch) => {
///                 let loss = model.forward(batch).mean();
///                 let grads = GradientsParams::from_grads(loss.backward(), &model);
///                 MicroStep::new(grads).with_loss(loss).with_weight(round.items as f64)
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
/// It holds one batch more than it has returned.
pub struct Lockstep<'a, G: Backend, O> {
    iterator: Box<dyn DataLoaderIterator<O> + 'a>,
    group: ProcessGroup<G>,
    uneven: Uneven,
    /// True if one batch is taken ahead of the current round.
    lookahead: bool,
    /// True if a batch without items is a placeholder, and false if its iterator does not count items.
    placeholders: bool,
    /// The batch after the current round; `None` before the first round.
    following: Option<Held<O>>,
    started: bool,
    /// The iterator has ended.
    exhausted: bool,
    /// All ranks have agreed that no round follows.
    finished: bool,
    failed: Option<Error>,
    cause_of_panic: Box<CauseOfPanic<'a>>,
    /// Processed and total items of this rank up to the current round.
    progress: (usize, usize),
}

/// A batch that was taken from the iterator.
struct Held<O> {
    batch: O,
    items: usize,
    progress: (usize, usize),
}

/// Function from the message of a panic to its cause on another thread, if known.
type CauseOfPanic<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// One round of [`Lockstep`]: a micro-step of all ranks.
#[derive(Debug)]
pub struct Round<O> {
    /// This rank's batch; `None` if it has run out and others have not.
    pub batch: Option<O>,
    /// Number of items of this rank's batch as its loader counts them, which is the weight of its micro-step: 0 without
    /// a batch and for a placeholder, 1 for each batch of an iterator that does not count.
    pub items: usize,
    /// Number of items of all ranks' batches.
    pub items_all: usize,
    /// True in the last round, on all ranks.
    pub last: bool,
    /// True if some rank requested a stop, which makes the round the last one.
    pub stop: bool,
    /// Items of all ranks up to and including this round, and in total as far as the loaders know.
    pub progress: Progress,
}

/// Message of a rank to all others before each round.
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
    /// Iterates over `iterator` in step with the other ranks of `group`, whose iterators may have any length.
    pub fn new(
        iterator: Box<dyn DataLoaderIterator<O> + 'a>,
        group: &ProcessGroup<G>,
        uneven: Uneven,
    ) -> Self {
        Self {
            iterator,
            group: group.clone(),
            uneven,
            lookahead: true,
            placeholders: group.ranks().attached::<Shards>().any_makes_placeholders(),
            following: None,
            started: false,
            exhausted: false,
            finished: false,
            failed: None,
            cause_of_panic: Box::new(|_| None),
            progress: (0, 0),
        }
    }

    /// Adds the cause that `cause` finds to the error of a panic: the panic of an iterator lacks that of its threads.
    pub(crate) fn with_cause_of_panics(self, cause: impl Fn(&str) -> Option<String> + 'a) -> Self {
        Self { cause_of_panic: Box::new(cause), ..self }
    }

    /// Takes no batch ahead in a world of one, so that batches and steps draw from a common random stream in the order
    /// of the plain loop. The last round is then not known as such.
    pub(crate) fn without_looking_ahead(self) -> Self {
        Self { lookahead: self.group.world_size() > 1, ..self }
    }

    /// Returns the next round on all ranks, or `None` on all ranks; all ranks must call it. If any rank passes `stop`,
    /// the returned round is the last one.
    ///
    /// # Errors
    /// - [`ErrorKind::Program`] if the iterator panics, with its message, or ends before the total of its
    ///   [`progress`](DataLoaderIterator::progress), as Burn's loaders do if `Dataset::get` returns `None` below
    ///   `len()`; the other ranks get it as the failure of this one;
    /// - [`ErrorKind::Mismatch`] if ranks were given different [`Uneven`];
    /// - any error of the group.
    pub fn next(&mut self, stop: bool) -> Result<Option<Round<O>>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        self.next_round(stop).inspect_err(|error| {
            self.group.fail(error);
            self.failed = Some(error.clone());
        })
    }

    fn next_round(&mut self, stop: bool) -> Result<Option<Round<O>>> {
        if self.finished {
            return Ok(None);
        }
        if !self.lookahead || !self.started {
            self.started = true;
            self.following = self.take_batch()?;
        }
        let current = self.following.take();
        if self.lookahead {
            self.following = self.take_batch()?;
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
        self.finished = stop || (self.lookahead && !agreed(|report| report.following));
        if !agreed(|report| report.current) {
            self.finished = true;
            return Ok(None);
        }
        let sum = |value: fn(&Report) -> usize| reports.iter().map(value).sum();
        Ok(Some(Round {
            batch: current.map(|held| held.batch),
            items,
            items_all: sum(|report| report.items),
            last: self.finished,
            stop,
            progress: Progress::new(sum(|report| report.processed), sum(|report| report.total)),
        }))
    }

    /// Takes the next batch from the iterator.
    fn take_batch(&mut self) -> Result<Option<Held<O>>> {
        if self.exhausted {
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
            match (self.cause_of_panic)(&error.to_string()) {
                Some(cause) => Error::new(error.kind(), format!("{error}: {cause}")),
                None => error,
            }
        })?;
        let (processed, total) = (progress.items_processed, progress.items_total);
        let Some(batch) = batch else {
            self.exhausted = true;
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
