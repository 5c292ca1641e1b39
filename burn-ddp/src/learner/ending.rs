//! The end of a training, after the last epoch and after an error.
//!
//! Burn sends the processor an `End` event and then waits for its renderer. If the metrics thread panics on that event
//! (printing a summary into a closed pipe does), Burn waits for ever. [`Ending`] stands between the two and answers in
//! place of a thread that has panicked.

use std::sync::{Arc, Mutex, PoisonError};

use burn::train::renderer::MetricsRenderer;
use burn::train::{AsyncProcessorTraining, EventProcessorTraining, LearnerEvent, LearningComponentsTypes};
use burn_ddp_comm::{Error, Result};

use super::events::settle;
use super::output::DdpOutput;
use super::panics::Panics;
use super::silent::SilentRenderer;
use super::types::{Processor, TrainOutputOf, ValidOutputOf};

/// A processor that stores the first failure of the one inside.
pub(super) struct Ending<LC: LearningComponentsTypes> {
    processor: Processor<LC>,
    panics: Panics,
    failure: Arc<Mutex<Option<Error>>>,
}

impl<LC> Ending<LC>
where
    LC: LearningComponentsTypes + Send + 'static,
    TrainOutputOf<LC>: DdpOutput,
    ValidOutputOf<LC>: DdpOutput,
{
    pub(super) fn guard(
        processor: Processor<LC>,
        panics: &Panics,
        failure: &Arc<Mutex<Option<Error>>>,
    ) -> Processor<LC> {
        let ending = Self { processor, panics: panics.clone(), failure: failure.clone() };
        AsyncProcessorTraining::new(ending)
    }

    fn store_failure(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }
}

impl<LC> EventProcessorTraining<LearnerEvent<TrainOutputOf<LC>>, LearnerEvent<ValidOutputOf<LC>>>
    for Ending<LC>
where
    LC: LearningComponentsTypes + Send + 'static,
    TrainOutputOf<LC>: DdpOutput,
    ValidOutputOf<LC>: DdpOutput,
{
    fn process_train(&mut self, event: LearnerEvent<TrainOutputOf<LC>>) {
        let sent = self.panics.guard_threads("the end", || self.processor.process_train(event));
        self.store_failure(sent);
    }

    fn process_valid(&mut self, event: LearnerEvent<ValidOutputOf<LC>>) {
        let sent = self.panics.guard_threads("the end", || self.processor.process_valid(event));
        self.store_failure(sent);
    }

    fn renderer(mut self) -> Box<dyn MetricsRenderer> {
        let settled = self.panics.guard_threads("the renderer", || settle::<LC>(&mut self.processor));
        let answered = settled.is_ok();
        self.store_failure(settled);
        if answered { self.processor.renderer() } else { Box::new(SilentRenderer::default()) }
    }
}

/// Drops the processor's renderer, which gives the terminal back. Its thread may have ended already.
pub(super) fn drop_renderer<LC: LearningComponentsTypes>(panics: &Panics, mut processor: Processor<LC>) {
    let _ = panics.guard_threads("the renderer", || {
        settle::<LC>(&mut processor);
        drop(processor.renderer());
    });
}

/// Waits for the threads of `checkpointer`; one that panicked is an error instead of a second panic.
pub(super) fn drop_checkpointer<T>(panics: &Panics, checkpointer: T) -> Result<()> {
    panics.guard_threads("the checkpointer", || drop(checkpointer))
}
