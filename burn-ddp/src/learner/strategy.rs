//! The strategy that Burn calls: everything before the first epoch and after the last.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::train::renderer::MetricsRenderer;
use burn::train::{
    AsyncProcessorTraining, EventProcessorTraining, Learner, LearnerEvent, LearningComponentsTypes,
    LearningResult, SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader,
    TrainingComponents, TrainingModel, ValidLoader,
};

use super::options::DdpStrategy;
use super::output::DdpOutput;
use super::panics::Panics;
use super::session::{Events, Session, saved, settle};
use super::silent::Silent;
use super::{Inner, TrainOutputOf, ValidOutputOf, state};
use crate::error::{Error, Result};
use crate::parameters;
use crate::rank::Rank;
use crate::replica::{Replica, Reproducibility, split_mix64};

/// One launch on this rank.
pub(super) struct Strategy<LC: LearningComponentsTypes> {
    ddp: DdpStrategy<Inner<LC>>,
    panics: Panics,
    /// Metrics that this rank's renderer was told of.
    names: Arc<Mutex<Vec<String>>>,
    /// Why the launch failed; Burn's `train` has no way to return it.
    pub(super) failure: Arc<Mutex<Option<Error>>>,
}

/// What is ready before the first epoch.
struct Prepared<LC: LearningComponentsTypes> {
    learner: Learner<LC>,
    replica: Replica<LC::Backend>,
    first_epoch: usize,
}

impl<LC: LearningComponentsTypes> Strategy<LC> {
    pub(super) fn new(ddp: DdpStrategy<Inner<LC>>, panics: Panics, names: Arc<Mutex<Vec<String>>>) -> Self {
        Self { ddp, panics, names, failure: Arc::default() }
    }

    /// The same learner on every rank, at the epoch from which rank 0 goes on.
    fn prepare(
        &self,
        mut learner: Learner<LC>,
        components: &mut TrainingComponents<LC>,
    ) -> Result<Prepared<LC>> {
        let group = &self.ddp.group;
        group.alike(match (components.grad_accumulation, self.ddp.options.replica.reproducibility) {
            (Some(0), _) => {
                Err(Error::config("grads_accumulation(0): give the micro-steps of an optimizer step"))
            }
            (_, Reproducibility::AnyWorldSize { .. }) => Err(Error::config(
                "Reproducibility::AnyWorldSize with a Learner: it divides every batch among the ranks, so that each \
                 number of ranks computes other sums; use a loop of your own, with the same micro-batches in all \
                 worlds",
            )),
            _ => Ok(()),
        })?;
        let settings = format!(
            "{} epochs, gradients accumulated over {}, {:?}",
            components.num_epochs,
            components.grad_accumulation.unwrap_or(1),
            self.ddp.options
        );
        group.compare("trainings", settings)?;
        learner.fork(group.device());
        let mut last_epoch = 0;
        if group.rank().is_root() {
            last_epoch = components.checkpoint.unwrap_or(0);
            if let (Some(epoch), Some(checkpointer)) = (components.checkpoint, &components.checkpointer) {
                let built = specs(&learner);
                let loaded = self.panics.guard_threads(&format!("loading checkpoint {epoch}"), || {
                    checkpointer.load_checkpoint(learner, group.device(), epoch)
                });
                learner = loaded.map_err(|error| {
                    error.context(format!(
                        "checkpoint({epoch}) cannot be loaded; is it in the folder `checkpoint` of the artifacts, saved \
                         by the same recorder"
                    ))
                })?;
                same_model(&built, &specs(&learner))
                    .map_err(|error| error.context(format!("checkpoint {epoch} is of another model")))?;
            }
        }
        let last_epoch = group.broadcast_bytes(&last_epoch.to_le_bytes(), Rank(0))?;
        let last_epoch = last_epoch.try_into().map_or(0, usize::from_le_bytes);
        let (model, replica) = Replica::new(learner.model(), group, self.ddp.options.replica.clone())?;
        if group.world_size() > 1 {
            learner.load_model(model.into_record());
            state::broadcast(&mut learner, &components.event_store, group)?;
        }
        if let Rank(rank @ 1..) = group.rank() {
            // A training that goes on does not draw again what its first epoch drew.
            let seed = split_mix64(split_mix64(self.ddp.options.seed, rank as u64), last_epoch as u64);
            <LC::Backend as Backend>::seed(group.device(), seed);
        }
        Ok(Prepared { learner, replica, first_epoch: last_epoch + 1 })
    }

    /// Keeps the error, tells the peers, gives the terminal back, and leaves Burn's `launch` without a word.
    fn leave(&self, error: Error, mut processor: SupervisedTrainingEventProcessor<LC>) -> ! {
        self.ddp.group.fail(&error);
        // The renderer restores the terminal when it is dropped; its thread may be gone.
        let _ = self.panics.guard_threads("the renderer", || {
            settle::<LC>(&mut processor);
            drop(processor.renderer());
        });
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        std::panic::resume_unwind(Box::new("the training failed"))
    }
}

/// Path and shape of every parameter.
fn specs<LC: LearningComponentsTypes>(learner: &Learner<LC>) -> Vec<(String, Vec<usize>)> {
    let params = parameters::describe::<LC::Backend, _>(&learner.model());
    params.into_iter().map(|param| (param.spec.path, param.spec.shape)).collect()
}

/// Refuses a record that has changed the model: Burn takes shapes as they come and drops layers that a record lacks.
fn same_model(built: &[(String, Vec<usize>)], loaded: &[(String, Vec<usize>)]) -> Result<()> {
    let of = |all: &[(String, Vec<usize>)], path: &str| {
        all.iter().find(|one| one.0 == path).map(|one| one.1.clone())
    };
    for (path, here) in built {
        match of(loaded, path) {
            None => return Err(Error::config(format!("it has no `{path}`, which the learner's model has"))),
            Some(there) if there != *here => {
                return Err(Error::config(format!(
                    "`{path}` is {there:?} there and {here:?} in the learner's model"
                )));
            }
            Some(_) => {}
        }
    }
    match loaded.iter().find(|(path, _)| of(built, path).is_none()) {
        None => Ok(()),
        Some((path, _)) => Err(Error::config(format!("it has `{path}`, which the learner's model has not"))),
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
        match self.prepare(learner, &mut components) {
            Ok(Prepared { learner, replica, first_epoch }) => {
                components.checkpoint = None;
                let epochs = Epochs { strategy: self, prepared: RefCell::new(Some((replica, first_epoch))) };
                epochs.train(learner, train, valid, components)
            }
            Err(error) => {
                let TrainingComponents { event_processor, checkpointer, .. } = components;
                let _ = drop_quietly(&self.panics, checkpointer);
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
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        let error = Error::config("the strategy's `fit` was called without its `train`");
        self.leave(error, components.event_processor)
    }
}

/// The part for which Burn's own `train` is right: start and end of the events, the summary with the model.
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
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        let Strategy { ddp, panics, names, .. } = self.strategy;
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
        let events = Events::new(event_processor, event_store, panics.clone(), ddp.group.rank());
        let accumulation = grad_accumulation.unwrap_or(1);
        let mut session = Session::new(ddp, replica, learner, events, interrupter.clone(), accumulation);
        let trained =
            session.train(names, train, valid, first_epoch..=num_epochs, &mut checkpointer, early_stopping);
        // Before the replica, which may be in the middle of a backward pass, is dropped and finds another cause.
        let trained = trained.inspect_err(|error| ddp.group.fail(error));
        let (learner, mut processor, store) = session.into_parts();
        // After a stop there may be metrics to come.
        let settled = panics.guard_threads("the metrics", || settle::<LC>(&mut processor));
        // The last checkpoint may still be on its way, and it fails for all ranks or for none.
        let written = drop_quietly(panics, checkpointer).and_then(|()| saved(&interrupter, ddp.group.rank()));
        // Its thread may be gone, which must not hide why.
        let stored = panics.guard_threads("the metric store", || drop(store));
        match trained.and(settled).and(written).and(stored).and_then(|()| ddp.group.barrier()) {
            Ok(()) => (learner.model(), Ending::<LC>::guard(processor, panics, &self.strategy.failure)),
            Err(error) => self.strategy.leave(error, processor),
        }
    }
}

/// Burn's processor after the last epoch. Burn sends it the end and then waits for its renderer, for ever if the end was
/// too much for it (a summary that nobody reads panics): so its answer goes through here.
struct Ending<LC: LearningComponentsTypes> {
    processor: SupervisedTrainingEventProcessor<LC>,
    panics: Panics,
    failure: Arc<Mutex<Option<Error>>>,
}

impl<LC> Ending<LC>
where
    LC: LearningComponentsTypes + Send + 'static,
    TrainOutputOf<LC>: DdpOutput,
    ValidOutputOf<LC>: DdpOutput,
{
    fn guard(
        processor: SupervisedTrainingEventProcessor<LC>,
        panics: &Panics,
        failure: &Arc<Mutex<Option<Error>>>,
    ) -> SupervisedTrainingEventProcessor<LC> {
        let ending = Self { processor, panics: panics.clone(), failure: failure.clone() };
        AsyncProcessorTraining::new(ending)
    }

    fn note(&self, outcome: Result<()>) {
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
        self.note(sent);
    }

    fn process_valid(&mut self, event: LearnerEvent<ValidOutputOf<LC>>) {
        let sent = self.panics.guard_threads("the end", || self.processor.process_valid(event));
        self.note(sent);
    }

    fn renderer(mut self) -> Box<dyn MetricsRenderer> {
        let settled = self.panics.guard_threads("the renderer", || settle::<LC>(&mut self.processor));
        let answered = settled.is_ok();
        self.note(settled);
        if answered { self.processor.renderer() } else { Box::new(Silent::default()) }
    }
}

/// Waits for the threads of `checkpointer`; one that panicked is an error and no second panic.
fn drop_quietly<T>(panics: &Panics, checkpointer: T) -> Result<()> {
    panics.guard_threads("the checkpointer", || drop(checkpointer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_differ_by_rank_and_by_seed() {
        let seeds = [split_mix64(0, 1), split_mix64(0, 2), split_mix64(1, 1), split_mix64(1, 2)];
        assert!((1..4).all(|i| !seeds[..i].contains(&seeds[i])), "{seeds:?}");
        assert_eq!(split_mix64(7, 3), split_mix64(7, 3));
    }
}
