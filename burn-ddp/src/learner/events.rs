//! Events of a training on their way to metrics, files and renderer, which run on threads of their own.
//!
//! All ranks run these threads, because Burn starts them, but only rank 0 sends them events.

use std::sync::Arc;

use burn::train::metric::store::EventStoreClient;
use burn::train::{EventProcessorTraining, LearnerEvent, LearningComponentsTypes};
use burn_ddp_comm::Result;
use derive_new::new;

use super::panics::Panics;
use super::types::{Processor, TrainOutputOf, ValidOutputOf};

/// The receiver of events and the store that its metrics write to.
#[derive(new)]
pub(super) struct Events<LC: LearningComponentsTypes> {
    pub(super) processor: Processor<LC>,
    pub(super) store: Arc<EventStoreClient>,
    pub(super) panics: Panics,
    is_root: bool,
}

impl<LC: LearningComponentsTypes> Events<LC> {
    /// Sends an event of the training split on rank 0; does nothing on the others.
    pub(super) fn train(&mut self, event: LearnerEvent<TrainOutputOf<LC>>) -> Result<()> {
        if !self.is_root {
            return Ok(());
        }
        self.panics.guard_threads("the metrics", || self.processor.process_train(event))
    }

    /// Sends an event of the validation split on rank 0; does nothing on the others.
    pub(super) fn valid(&mut self, event: LearnerEvent<ValidOutputOf<LC>>) -> Result<()> {
        if !self.is_root {
            return Ok(());
        }
        self.panics.guard_threads("the metrics", || self.processor.process_valid(event))
    }

    /// Waits for the metrics thread; see [`settle`].
    pub(super) fn settle(&mut self) -> Result<()> {
        self.panics.guard_threads("the metrics", || settle::<LC>(&mut self.processor))
    }

    /// Waits until rank 0's metrics are computed and sent to the store, which answers later questions after them.
    /// The store itself is not asked: it would ask the loggers, of which some have no answer.
    pub(super) fn flush(&mut self) -> Result<()> {
        if self.is_root { self.settle() } else { Ok(()) }
    }
}

/// Waits until the metrics thread has handled all earlier events. Its channel holds one event, so once it has taken the
/// second of two events without effect, everything before the first is done. Ask for the renderer only after this: a
/// thread that panics on an earlier event never answers.
pub(super) fn settle<LC: LearningComponentsTypes>(processor: &mut Processor<LC>) {
    processor.process_valid(LearnerEvent::Start);
    processor.process_valid(LearnerEvent::Start);
}
