//! A training from its first epoch to its last, in step on all ranks.
//!
//! What is decided between epochs (a checkpoint, an early stop) is decided on rank 0 alone, from metrics that are
//! computed on other threads; so they are waited for first, and the decision is sent to the others.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};

use burn::data::dataloader::Progress;
use burn::train::checkpoint::CheckpointerError;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, Interrupter, Learner, LearnerEvent,
    LearningCheckpointer, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader,
    ValidLoader,
};

use super::gather::Outputs;
use super::options::{BufferPolicy, DdpStrategy};
use super::output::DdpOutput;
use super::panics::Panics;
use super::signals::StopSignals;
use super::{Inner, TrainOutputOf, ValidOutputOf};
use crate::data::{self, ShardState};
use crate::error::{Error, ErrorKind, Result};
use crate::nn::SyncState;
use crate::rank::Rank;
use crate::replica::Replica;

/// The items that a learner's model returns in training and validation.
type Processor<LC> = SupervisedTrainingEventProcessor<LC>;

/// Metrics, files and renderer, which live on threads of their own; only rank 0 has any.
pub(super) struct Events<LC: LearningComponentsTypes> {
    processor: Processor<LC>,
    pub(super) store: Arc<EventStoreClient>,
    panics: Panics,
    is_root: bool,
}

impl<LC: LearningComponentsTypes> Events<LC> {
    pub(super) fn new(
        processor: Processor<LC>,
        store: Arc<EventStoreClient>,
        panics: Panics,
        rank: Rank,
    ) -> Self {
        Self { processor, store, panics, is_root: rank.is_root() }
    }

    pub(super) fn train(&mut self, event: LearnerEvent<TrainOutputOf<LC>>) -> Result<()> {
        if !self.is_root {
            return Ok(());
        }
        self.panics.guard_threads("the metrics", || self.processor.process_train(event))
    }

    pub(super) fn valid(&mut self, event: LearnerEvent<ValidOutputOf<LC>>) -> Result<()> {
        if !self.is_root {
            return Ok(());
        }
        self.panics.guard_threads("the metrics", || self.processor.process_valid(event))
    }

    /// See [`settle`].
    fn settle(&mut self) -> Result<()> {
        self.panics.guard_threads("the metrics", || settle::<LC>(&mut self.processor))
    }

    /// Returns when metrics are computed and on their way to the store, which answers whoever asks it after them.
    /// It is not asked here: it would ask the loggers, and one that only sends values elsewhere has no answer.
    fn flush(&mut self) -> Result<()> {
        if self.is_root { self.settle() } else { Ok(()) }
    }
}

/// Returns when the thread that computes metrics is done with everything it was sent: the channel to it holds one
/// event, so when a second one that does nothing is taken, all before the first are done. The question for the renderer
/// must come after that: one that is sent to a thread about to panic is never answered.
pub(super) fn settle<LC: LearningComponentsTypes>(processor: &mut Processor<LC>) {
    processor.process_valid(LearnerEvent::Start);
    processor.process_valid(LearnerEvent::Start);
}

/// What a rank trains with.
pub(super) struct Session<'a, LC: LearningComponentsTypes> {
    pub(super) ddp: &'a DdpStrategy<Inner<LC>>,
    pub(super) replica: Replica<LC::Backend>,
    pub(super) learner: Learner<LC>,
    pub(super) events: Events<LC>,
    pub(super) outputs: Outputs<Inner<LC>>,
    pub(super) panics: Panics,
    /// Layers that communicate in their forward pass.
    pub(super) sync: Arc<SyncState>,
    /// Micro-steps of an optimizer step.
    pub(super) accumulation: usize,
    /// Optimizer steps so far.
    pub(super) steps: usize,
    /// Whether every weight so far was the number of items that the loader counts; `None` before the first.
    pub(super) weight_was_items: Option<bool>,
    /// The learner before the window that is under way, if that may be dropped.
    pub(super) before_window: Option<Learner<LC>>,
    interrupter: Interrupter,
    signals: Option<StopSignals>,
}

impl<'a, LC> Session<'a, LC>
where
    LC: LearningComponentsTypes,
    TrainOutputOf<LC>: DdpOutput,
    ValidOutputOf<LC>: DdpOutput,
{
    pub(super) fn new(
        ddp: &'a DdpStrategy<Inner<LC>>,
        replica: Replica<LC::Backend>,
        learner: Learner<LC>,
        events: Events<LC>,
        interrupter: Interrupter,
        accumulation: usize,
    ) -> Self {
        Self {
            ddp,
            replica,
            learner,
            panics: events.panics.clone(),
            events,
            outputs: Outputs::new(ddp.group.clone(), ddp.options.output_limit),
            sync: ddp.group.ranks().attached(),
            accumulation,
            steps: 0,
            weight_was_items: None,
            before_window: None,
            interrupter,
            signals: None,
        }
    }

    pub(super) fn into_parts(self) -> (Learner<LC>, Processor<LC>, Arc<EventStoreClient>) {
        (self.learner, self.events.processor, self.events.store)
    }

    /// Runs `epochs`.
    pub(super) fn train(
        &mut self,
        names: &Mutex<Vec<String>>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        epochs: RangeInclusive<usize>,
        checkpointer: &mut Option<LearningCheckpointer<LC>>,
        mut early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    ) -> Result<()> {
        let group = &self.ddp.group;
        self.signals = Some(StopSignals::watch(self.ddp.options.signals)?);
        self.learn_names(names)?;
        let train_shard = group.ranks().agree_on_error(data::sharded(&train, group, "training"))?;
        let valid_shard = group.ranks().agree_on_error(data::sharded(&valid, group, "validation"))?;
        for (shard, what) in [(&train_shard, "training"), (&valid_shard, "validation")] {
            if let Some(shard) = shard {
                data::compare(shard, group, what)?;
            }
        }
        let placed = self.place(train_shard.as_deref());
        let (train, valid) = (train.to_device(group.device()), valid.to_device(group.device()));
        if *epochs.start() > 1 {
            // Burn counts epochs by these events, and would overwrite the files of the first one.
            self.events.train(LearnerEvent::EndEpoch(epochs.start() - 1))?;
            self.events.valid(LearnerEvent::EndEpoch(epochs.start() - 1))?;
        }
        let total = *epochs.end();
        for epoch in epochs {
            for shard in [&train_shard, &valid_shard].into_iter().flatten() {
                // From 0, as loaders count by themselves.
                shard.set_epoch(epoch - 1);
            }
            let progress = Progress::new(epoch, total);
            let stopped = self.train_epoch(train.as_ref(), &progress, placed)?;
            if self.ddp.options.policy != BufferPolicy::Never {
                self.replica.sync_buffers(&self.learner.model(), self.ddp.options.buffers)?;
            }
            if stopped {
                break;
            }
            // A stop in the validation leaves metrics incomplete, on which nothing is decided.
            if self.valid_epoch(valid.as_ref(), &progress)?
                || self.is_over(epoch, checkpointer, &mut early_stopping)?
            {
                break;
            }
        }
        Ok(())
    }

    /// Tells rank 0 which metrics there are: it cannot look, but the renderer of another rank is ours.
    fn learn_names(&mut self, names: &Mutex<Vec<String>>) -> Result<()> {
        let group = &self.ddp.group;
        if group.world_size() == 1 {
            return Ok(());
        }
        if !group.rank().is_root() {
            self.events.settle()?;
        }
        let mine = names.lock().unwrap_or_else(PoisonError::into_inner).join("\n");
        let all = group.all_gather_bytes(mine.into_bytes())?;
        let seen = String::from_utf8_lossy(&all[all.len() - 1]);
        self.outputs.metrics = seen.lines().map(str::to_owned).collect();
        Ok(())
    }

    /// Whether ranks without items are given a batch to run the forward pass on, for layers that communicate there.
    fn place(&self, shard: Option<&ShardState>) -> bool {
        let needed = self.sync.modules() > 0 && self.ddp.group.world_size() > 1;
        let placed = needed && shard.is_some_and(ShardState::can_place);
        if let Some(shard) = shard {
            shard.set_placeholders(placed);
        }
        placed
    }

    /// Whether this rank wants to stop.
    pub(super) fn wants_to_stop(&self) -> bool {
        // Not twice: the first reason is the one to tell.
        if let Some(signal) = self.signals.as_ref().and_then(StopSignals::came)
            && !self.interrupter.should_stop()
        {
            self.interrupter.stop(Some(&format!("{signal} asked for it")));
        }
        self.interrupter.should_stop()
    }

    /// Called on all ranks alike when a stop was agreed on.
    pub(super) fn stopping(&self, epoch: usize, iteration: usize) -> Result<()> {
        saved(&self.interrupter, self.ddp.group.rank())?;
        if !self.interrupter.should_stop() {
            self.interrupter.stop(Some("another rank asked for it"));
        }
        tracing::info!(
            "stopping at step {} (epoch {epoch}, iteration {iteration}) on {}: {}",
            self.steps,
            self.ddp.group.rank(),
            self.interrupter.get_message().as_deref().unwrap_or("this rank was asked to")
        );
        Ok(())
    }

    /// Saves and decides whether this was the last epoch, on rank 0 and for all.
    fn is_over(
        &mut self,
        epoch: usize,
        checkpointer: &mut Option<LearningCheckpointer<LC>>,
        early_stopping: &mut Option<Box<dyn CloneEarlyStoppingStrategy>>,
    ) -> Result<bool> {
        self.events.flush()?;
        let (learner, store) = (&self.learner, &self.events.store);
        if let Some(mut saving) = checkpointer.take() {
            let saved =
                self.panics.guard_threads("the checkpointer", || saving.checkpoint(learner, epoch, store));
            if let Err(error) = saved {
                // A thread of it is gone. Dropping it would panic once for each that is, and so end the process.
                std::mem::forget(saving);
                return Err(error);
            }
            *checkpointer = Some(saving);
        }
        let over = match early_stopping {
            Some(strategy) => self
                .panics
                .guard_threads("the early stopping strategy", || strategy.should_stop(epoch, store))?,
            None => false,
        };
        let over = self.ddp.group.broadcast_bytes(&[u8::from(over)], Rank(0))?;
        Ok(over == [1])
    }
}

/// The error of a checkpoint that could not be written, if there is one. The thread that writes has no other way to say
/// so than to interrupt the training. What an interrupter says that was reset since is of another training.
pub(super) fn saved(interrupter: &Interrupter, rank: Rank) -> Result<()> {
    let reason = interrupter.get_message().filter(|_| interrupter.should_stop());
    match reason.filter(|reason| tells_of_checkpoint(reason)) {
        None => Ok(()),
        Some(reason) => {
            Err(Error::new(ErrorKind::Io, format!("a checkpoint could not be saved by {rank}: {reason}")))
        }
    }
}

/// Whether the reason of an interruption is Burn's word for a checkpoint that failed.
fn tells_of_checkpoint(reason: &str) -> bool {
    let kinds = [
        CheckpointerError::Unknown(String::new()),
        CheckpointerError::IOError(std::io::Error::other("")),
        CheckpointerError::RecorderError(burn::record::RecorderError::Unknown(String::new())),
    ];
    kinds.iter().any(|kind| {
        let text = kind.to_string();
        text.split_once('`').is_some_and(|(before, _)| reason.starts_with(before))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupter_that_was_reset_says_nothing_of_this_training() {
        let interrupter = Interrupter::new();
        interrupter.stop(Some(&CheckpointerError::Unknown("full".into()).to_string()));
        assert!(saved(&interrupter, Rank(0)).is_err());
        interrupter.reset();
        assert!(saved(&interrupter, Rank(0)).is_ok());
    }

    #[test]
    fn a_checkpoint_that_failed_is_told_from_a_wish_to_stop() {
        let full = CheckpointerError::IOError(std::io::Error::other("No space left on device"));
        assert!(tells_of_checkpoint(&full.to_string()));
        assert!(!tells_of_checkpoint("Stopping training through the TUI"));
    }
}
