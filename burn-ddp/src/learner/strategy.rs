//! The strategy that Burn calls with everything that its launch has built.
//!
//! [`Strategy`] prepares the learner and lets Burn's own `train` do the rest for which it is right: start and end of
//! the events, and the summary. That `train` calls `fit` of [`Epochs`], which runs the epochs. Neither can return an
//! error, so an error is stored in [`Strategy::failure`], and a panic without a message leaves Burn's launch.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use burn::train::metric::store::EventStoreClient;
use burn::train::{
    Interrupter, Learner, LearningCheckpointer, LearningComponentsTypes, LearningResult,
    SupervisedLearningStrategy, TrainLoader, TrainingComponents, TrainingModel, ValidLoader,
};
use burn_ddp_comm::{Error, Result};

use super::ending::{Ending, drop_checkpointer, drop_renderer};
use super::events::{Events, settle};
use super::options::DdpStrategy;
use super::output::DdpOutput;
use super::panics::Panics;
use super::prepare::{Prepared, prepare};
use super::session::{Session, check_checkpoints};
use super::types::{Inner, Processor, TrainOutputOf, ValidOutputOf};
use crate::replica::Replica;

/// One launch on this rank.
pub(super) struct Strategy<LC: LearningComponentsTypes> {
    ddp: DdpStrategy<Inner<LC>>,
    panics: Panics,
    /// Names of the metrics that Burn registered with this rank's renderer.
    names: Arc<Mutex<Vec<String>>>,
    /// The error of the launch, which Burn's `train` has no way to return.
    pub(super) failure: Arc<Mutex<Option<Error>>>,
}

impl<LC: LearningComponentsTypes> Strategy<LC> {
    pub(super) fn new(ddp: DdpStrategy<Inner<LC>>, panics: Panics, names: Arc<Mutex<Vec<String>>>) -> Self {
        Self { ddp, panics, names, failure: Arc::default() }
    }

    /// Ends the group by `error`, stores it, gives the terminal back, and leaves Burn's `launch`.
    fn leave(&self, error: Error, processor: Processor<LC>) -> ! {
        self.ddp.group.fail(&error);
        drop_renderer::<LC>(&self.panics, processor);
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        std::panic::resume_unwind(Box::new("the training failed"))
    }

    /// Waits for metrics, checkpoints and all ranks after the last epoch, and returns the first error.
    fn finish(
        &self,
        trained: Result<()>,
        processor: &mut Processor<LC>,
        store: Arc<EventStoreClient>,
        checkpointer: Option<LearningCheckpointer<LC>>,
        interrupter: &Interrupter,
    ) -> Result<()> {
        let Self { ddp, panics, .. } = self;
        // After a stop, metrics may still be pending.
        let settled = panics.guard_threads("the metrics", || settle::<LC>(processor));
        // The last checkpoint may still be pending, and it fails for all ranks or for none.
        let written = drop_checkpointer(panics, checkpointer)
            .and_then(|()| check_checkpoints(interrupter, ddp.group.rank()));
        // The store's thread may have ended, which must not hide the cause.
        let stored = panics.guard_threads("the metric store", || drop(store));
        trained.and(settled).and(written).and(stored).and_then(|()| ddp.group.barrier())
    }
}

impl<LC> SupervisedLearningStrategy<LC> for Strategy<LC>
where
    LC: LearningComponentsTypes + Send + 'static,
    TrainOutputOf<LC>: DdpOutput,
    ValidOutputOf<LC>: DdpOutput,
{
    fn train(
        &self,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        mut components: TrainingComponents<LC>,
    ) -> LearningResult<LC::InferenceModel> {
        if !self.ddp.group.rank().is_root() {
            components.checkpointer = None;
            components.summary = None;
            components.early_stopping = None;
        }
        match prepare(&self.ddp, &self.panics, learner, &components) {
            Ok(Prepared { learner, replica, first_epoch }) => {
                components.checkpoint = None;
                let epochs = Epochs { strategy: self, prepared: RefCell::new(Some((replica, first_epoch))) };
                epochs.train(learner, train, valid, components)
            }
            Err(error) => {
                let TrainingComponents { event_processor, checkpointer, .. } = components;
                let _ = drop_checkpointer(&self.panics, checkpointer);
                self.leave(error, event_processor)
            }
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<LC>,
        _learner: Learner<LC>,
        _train: TrainLoader<LC>,
        _valid: ValidLoader<LC>,
        _first_epoch: usize,
    ) -> (TrainingModel<LC>, Processor<LC>) {
        let error = Error::config("the strategy's `fit` was called without its `train`");
        self.leave(error, components.event_processor)
    }
}

/// The epochs of a prepared training, as a strategy whose `train` is Burn's own.
struct Epochs<'a, LC: LearningComponentsTypes> {
    strategy: &'a Strategy<LC>,
    prepared: RefCell<Option<(Replica<LC::Backend>, usize)>>,
}

impl<LC> SupervisedLearningStrategy<LC> for Epochs<'_, LC>
where
    LC: LearningComponentsTypes + Send + 'static,
    TrainOutputOf<LC>: DdpOutput,
    ValidOutputOf<LC>: DdpOutput,
{
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        _first_epoch: usize,
    ) -> (TrainingModel<LC>, Processor<LC>) {
        let Strategy { ddp, panics, names, failure } = self.strategy;
        let TrainingComponents {
            num_epochs,
            mut checkpointer,
            interrupter,
            early_stopping,
            event_processor,
            event_store,
            grad_accumulation,
            ..
        } = components;
        let Some((replica, first_epoch)) = self.prepared.borrow_mut().take() else {
            let error = Error::config("a launch was trained twice");
            self.strategy.leave(error, event_processor)
        };
        let events = Events::new(event_processor, event_store, panics.clone(), ddp.group.rank().is_root());
        let accumulation = grad_accumulation.unwrap_or(1);
        let mut session = Session::new(ddp, replica, learner, events, accumulation, interrupter.clone());
        let epochs = first_epoch..=num_epochs;
        let trained = session.train(names, train, valid, epochs, &mut checkpointer, early_stopping);
        // Before the replica is dropped, which ends the group by another cause if a backward pass is incomplete.
        let trained = trained.inspect_err(|error| ddp.group.fail(error));
        let (learner, mut processor, store) = session.into_parts();
        match self.strategy.finish(trained, &mut processor, store, checkpointer, &interrupter) {
            Ok(()) => (learner.model(), Ending::<LC>::guard(processor, panics, failure)),
            Err(error) => self.strategy.leave(error, processor),
        }
    }
}
