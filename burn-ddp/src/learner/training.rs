//! A training from its first epoch to its last, in step on all ranks.
//!
//! Checkpoints and early stops are decided between epochs on rank 0 alone, from metrics that other threads compute. The
//! decision waits for these metrics and is then sent to the other ranks.

use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};

use burn::data::dataloader::Progress;
use burn::train::{
    CloneEarlyStoppingStrategy, LearnerEvent, LearningCheckpointer, LearningComponentsTypes, TrainLoader,
    ValidLoader,
};
use burn_ddp_comm::{Rank, Result};

use super::options::BufferPolicy;
use super::output::DdpOutput;
use super::session::Session;
use super::signals::StopSignals;
use super::types::{TrainOutputOf, ValidOutputOf};
use crate::data::{self, ShardState};

impl<LC> Session<'_, LC>
where
    LC: LearningComponentsTypes,
    TrainOutputOf<LC>: DdpOutput,
    ValidOutputOf<LC>: DdpOutput,
{
    /// Trains for `epochs`, counted from 1. `names` holds the metrics that Burn registered with this rank's renderer.
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
        self.share_metric_names(names)?;
        let shards = self.check_loaders(&train, &valid)?;
        let placeholders = self.enable_placeholders(shards[0].as_deref());
        let (train, valid) = (train.to_device(group.device()), valid.to_device(group.device()));
        if *epochs.start() > 1 {
            // Burn counts epochs by these events, and would overwrite the files of the first one.
            self.events.train(LearnerEvent::EndEpoch(epochs.start() - 1))?;
            self.events.valid(LearnerEvent::EndEpoch(epochs.start() - 1))?;
        }
        let total = *epochs.end();
        for epoch in epochs {
            for shard in shards.iter().flatten() {
                // Loaders count epochs from 0.
                shard.set_epoch(epoch - 1);
            }
            let progress = Progress::new(epoch, total);
            let stopped = self.train_epoch(train.as_ref(), &progress, placeholders)?;
            if self.ddp.options.policy != BufferPolicy::Never {
                self.replica.sync_buffers(&self.learner.model(), self.ddp.options.buffers)?;
            }
            if stopped {
                break;
            }
            // A stop in the validation leaves metrics incomplete, so nothing is decided by them.
            if self.valid_epoch(valid.as_ref(), &progress)?
                || self.decide(epoch, checkpointer, &mut early_stopping)?
            {
                break;
            }
        }
        Ok(())
    }

    /// Checks that the loaders are sharded, with equal options on all ranks.
    fn check_loaders(
        &self,
        train: &TrainLoader<LC>,
        valid: &ValidLoader<LC>,
    ) -> Result<[Option<Arc<ShardState>>; 2]> {
        let group = &self.ddp.group;
        let shards = [
            group.ranks().agree_on_error(data::sharded(train, group, "training"))?,
            group.ranks().agree_on_error(data::sharded(valid, group, "validation"))?,
        ];
        for (shard, split) in shards.iter().zip(["training", "validation"]) {
            if let Some(shard) = shard {
                data::compare(shard, group, split)?;
            }
        }
        Ok(shards)
    }

    /// Sends the names of the metrics from the last rank to all: rank 0 cannot list them, because its renderer is the
    /// user's.
    fn share_metric_names(&mut self, names: &Mutex<Vec<String>>) -> Result<()> {
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

    /// Makes the loader give ranks without items a placeholder batch if the forward pass communicates; returns true if
    /// it will.
    fn enable_placeholders(&self, shard: Option<&ShardState>) -> bool {
        let enabled = self.forward_communicates() && shard.is_some_and(ShardState::can_make_placeholders);
        if let Some(shard) = shard {
            shard.set_placeholders(enabled);
        }
        enabled
    }

    /// Saves a checkpoint and returns true if the training is over after `epoch`: rank 0 decides for all ranks.
    fn decide(
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
                // One of its threads has ended. Dropping it would panic once for each such thread and end the process.
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
