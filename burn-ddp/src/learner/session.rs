//! State of a training on one rank, and the reasons for which it stops early.

use std::sync::Arc;

use burn::train::checkpoint::CheckpointerError;
use burn::train::metric::store::EventStoreClient;
use burn::train::{Interrupter, Learner, LearningComponentsTypes};
use burn_ddp_comm::{Error, ErrorKind, Rank, Result};
use derive_new::new;

use super::events::Events;
use super::gather::Outputs;
use super::options::DdpStrategy;
use super::panics::Panics;
use super::signals::StopSignals;
use super::types::{Inner, Processor};
use crate::nn::SyncState;
use crate::replica::Replica;

/// State of a training from the first epoch to the last.
#[derive(new)]
pub(super) struct Session<'a, LC: LearningComponentsTypes> {
    pub(super) ddp: &'a DdpStrategy<Inner<LC>>,
    #[new(value = "events.panics.clone()")]
    pub(super) panics: Panics,
    pub(super) replica: Replica<LC::Backend>,
    pub(super) learner: Learner<LC>,
    pub(super) events: Events<LC>,
    #[new(value = "Outputs::new(ddp.group.clone(), ddp.options.output_limit)")]
    pub(super) outputs: Outputs<Inner<LC>>,
    /// Layers that communicate in their forward pass.
    #[new(value = "ddp.group.ranks().attached()")]
    pub(super) sync: Arc<SyncState>,
    /// Micro-steps of an optimizer step.
    pub(super) accumulation: usize,
    /// Optimizer steps so far.
    #[new(default)]
    pub(super) steps: usize,
    /// True while every weight has been the number of items that the loader counts; `None` before the first micro-step.
    #[new(default)]
    pub(super) weight_was_items: Option<bool>,
    /// The learner before the current window, if the window may be dropped.
    #[new(default)]
    pub(super) before_window: Option<Learner<LC>>,
    /// Set when the training begins.
    #[new(default)]
    pub(super) signals: Option<StopSignals>,
    interrupter: Interrupter,
}

impl<LC: LearningComponentsTypes> Session<'_, LC> {
    /// Drops the replica and the watch of signals, and returns the rest.
    pub(super) fn into_parts(self) -> (Learner<LC>, Processor<LC>, Arc<EventStoreClient>) {
        (self.learner, self.events.processor, self.events.store)
    }

    /// Alone and with one micro-step a window there is nothing to weigh, and every bit stays the plain loop's.
    pub(super) fn is_plain(&self) -> bool {
        self.ddp.group.world_size() == 1 && self.accumulation == 1
    }

    /// Layers of the model wait for the other ranks in their forward pass.
    pub(super) fn forward_communicates(&self) -> bool {
        self.sync.modules() > 0 && self.ddp.group.world_size() > 1
    }

    /// True if this rank requests a stop: by a signal, by Burn's interrupter, or for a checkpoint that failed.
    pub(super) fn requests_stop(&self) -> bool {
        // An interrupter that is already set keeps its first reason.
        if let Some(signal) = self.signals.as_ref().and_then(StopSignals::received)
            && !self.interrupter.should_stop()
        {
            self.interrupter.stop(Some(&format!("{signal} asked for it")));
        }
        self.interrupter.should_stop()
    }

    /// Records a stop that all ranks have agreed on; all ranks call it.
    pub(super) fn stop(&self, epoch: usize, iteration: usize) -> Result<()> {
        check_checkpoints(&self.interrupter, self.ddp.group.rank())?;
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
}

/// Returns the error of a checkpoint that could not be written. Burn's writing thread reports it only as the reason of
/// an interruption. The reason of an interrupter that was reset belongs to an earlier training.
pub(super) fn check_checkpoints(interrupter: &Interrupter, rank: Rank) -> Result<()> {
    let reason = interrupter.get_message().filter(|_| interrupter.should_stop());
    match reason.filter(|reason| is_checkpointer_error(reason)) {
        None => Ok(()),
        Some(reason) => {
            Err(Error::new(ErrorKind::Io, format!("a checkpoint could not be saved by {rank}: {reason}")))
        }
    }
}

/// True if `reason` begins as the text of one of Burn's checkpointer errors does.
fn is_checkpointer_error(reason: &str) -> bool {
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
        assert!(check_checkpoints(&interrupter, Rank(0)).is_err());
        interrupter.reset();
        assert!(check_checkpoints(&interrupter, Rank(0)).is_ok());
    }

    #[test]
    fn a_checkpoint_that_failed_is_told_from_a_wish_to_stop() {
        let full = CheckpointerError::IOError(std::io::Error::other("No space left on device"));
        assert!(is_checkpointer_error(&full.to_string()));
        assert!(!is_checkpointer_error("Stopping training through the TUI"));
    }
}
