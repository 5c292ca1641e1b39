//! One epoch: micro-steps in step on all ranks, an optimizer step after each window, one event a micro-step.

use burn::data::dataloader::{DataLoader, Progress};
use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::train::{
    InferenceStep, LearnerEvent, LearningComponentsTypes, TrainOutput, TrainStep, TrainingItem,
};

use super::options::{BufferPolicy, IncompleteWindow};
use super::output::DdpOutput;
use super::session::Session;
use super::{Inner, TrainOutputOf, ValidOutputOf};
use crate::data::{Lockstep, Turn, Uneven};
use crate::error::{Error, Result};
use crate::parameters;
use crate::replica::MicroStep;

type TrainInputOf<LC> = <<LC as LearningComponentsTypes>::TrainingModel as TrainStep>::Input;
type ValidInputOf<LC> = <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Input;

impl<LC> Session<'_, LC>
where
    LC: LearningComponentsTypes,
    TrainOutputOf<LC>: DdpOutput,
    ValidOutputOf<LC>: DdpOutput,
{
    /// Trains on all batches of the epoch that `global` counts. `placed`: the loader gives ranks without items a batch
    /// to run the forward pass on. Returns whether a stop was agreed on.
    pub(super) fn train_epoch(
        &mut self,
        loader: &dyn DataLoader<LC::Backend, TrainInputOf<LC>>,
        global: &Progress,
        placed: bool,
    ) -> Result<bool> {
        let epoch = global.items_processed;
        let iterator = self.panics.guard("the data loader", || loader.iter())?;
        let panics = self.panics.clone();
        let mut lockstep = Lockstep::new(iterator, &self.ddp.group, self.ddp.options.uneven)
            .explained_by(move |message| panics.behind(message));
        if self.accumulation == 1 {
            lockstep = lockstep.without_looking_ahead();
        }
        let (mut iteration, mut window, mut stopped) = (0, 0, false);
        while let Some(turn) = self.panics.quietly(|| lockstep.next(self.wants_to_stop()))? {
            iteration += 1;
            window += 1;
            if window == 1 {
                let may_be_dropped =
                    self.accumulation > 1 && self.ddp.options.window == IncompleteWindow::Drop;
                self.before_window = may_be_dropped.then(|| self.learner.clone());
                self.learner.lr_step();
            }
            let Turn { batch, items, last, stop, progress, .. } = turn;
            let completes =
                window == self.accumulation || (last && self.ddp.options.window == IncompleteWindow::Flush);
            let weight = self.weight_ahead(items);
            self.replica.expect(&self.learner.model(), completes, weight)?;
            let (micro_step, output) =
                self.forward_backward(batch, placed && items == 0, items, iteration)?;
            let model = self.learner.model();
            if completes {
                let reduced = self.replica.reduce(&model, micro_step)?;
                drop(model);
                self.optimize(reduced.grads)?;
                window = 0;
            } else {
                self.replica.no_sync(&model, micro_step)?;
            }
            if let Some(item) = self.gather(output, epoch, iteration)? {
                let lr = Some(self.learner.lr_current());
                let item = TrainingItem::new(item, progress, global.clone(), Some(iteration), lr);
                self.events.train(LearnerEvent::ProcessedItem(item))?;
            }
            if stop {
                self.stopping(epoch, iteration)?;
                stopped = true;
            }
        }
        drop(lockstep);
        self.replica.discard();
        // The window that was dropped has moved the schedule only, and a checkpoint must not hold that.
        if let Some(before) = self.before_window.take() {
            self.learner = before;
        }
        self.events.train(LearnerEvent::EndEpoch(epoch))?;
        Ok(stopped)
    }

    /// The weight of the micro-step of `items` items, where it is known before the step: the output says that it is the
    /// number of items, and so it has been.
    fn weight_ahead(&self, items: usize) -> Option<f64> {
        let known = <TrainOutputOf<LC> as DdpOutput>::WEIGHT_IS_ITEMS && self.weight_was_items == Some(true);
        (known && !self.is_plain()).then_some(items as f64)
    }

    /// Alone and with one micro-step a window there is nothing to weigh, and every bit stays the plain loop's.
    fn is_plain(&self) -> bool {
        self.ddp.group.world_size() == 1 && self.accumulation == 1
    }

    fn optimize(&mut self, gradients: GradientsParams) -> Result<()> {
        self.before_window = None;
        self.panics.guard("the optimizer step", || self.learner.optimizer_step(gradients))?;
        self.steps += 1;
        if self.ddp.options.policy == BufferPolicy::EveryStep {
            self.replica.sync_buffers(&self.learner.model(), self.ddp.options.buffers)?;
        }
        Ok(())
    }

    /// One micro-step of this rank, of `items` items as the loader counts. `absent`: the batch is there only so that the
    /// forward pass can be run.
    #[allow(clippy::type_complexity, reason = "a micro-step and the output it came with")]
    fn forward_backward(
        &mut self,
        batch: Option<TrainInputOf<LC>>,
        absent: bool,
        items: usize,
        iteration: usize,
    ) -> Result<(MicroStep<LC::Backend>, Option<TrainOutputOf<LC>>)> {
        let group = &self.ddp.group;
        let Some(batch) = batch else {
            if self.sync.modules() > 0 && group.world_size() > 1 {
                return Err(Error::config(format!(
                    "{} has no batch for iteration {iteration}, but the model has synchronized batch \
                     normalization, whose forward pass needs all ranks: build the loader with \
                     `burn_ddp::data::DataLoaderBuilder`, or give `Uneven::Truncate`",
                    group.rank()
                )));
            }
            return Ok((MicroStep::empty(), None));
        };
        if absent {
            self.join_in(batch)?;
            return Ok((MicroStep::empty(), None));
        }
        let learner = &self.learner;
        let output = self.panics.guard("the training step", || learner.train_step(batch));
        let TrainOutput { grads, item } = output?;
        let weight = self.panics.guard("the training output", || item.weight())?;
        self.weight_was_items = Some(self.weight_was_items != Some(false) && weight == items as f64);
        let micro_step = MicroStep::new(grads);
        Ok((if self.is_plain() { micro_step } else { micro_step.with_weight(weight) }, Some(item)))
    }

    /// Runs the step of a batch that is nobody's, for the layers of other ranks. Of the running states only those of
    /// layers that communicate have been moved by what is everybody's; the others get back what they had.
    fn join_in(&mut self, batch: TrainInputOf<LC>) -> Result<()> {
        let model = self.learner.model();
        let before = parameters::states::<LC::Backend, _>(&model)?;
        self.sync.set_absent(true);
        let learner = &self.learner;
        let output = self.panics.guard("the training step", || drop(learner.train_step(batch)));
        self.sync.set_absent(false);
        output?;
        let moved = self.sync.take_moved();
        // Writes what is pending, which would overwrite what is set.
        let _ = model.valid();
        let back = before.into_iter().filter(|(_, state)| !moved.contains(&state.id));
        let back = back.filter_map(|(position, state)| Some((position, state.tensor?))).collect();
        parameters::set_running_states::<LC::Backend, _>(&model, back)
    }

    /// Validates on all batches of the epoch that `global` counts. Returns whether a stop was agreed on.
    pub(super) fn valid_epoch(
        &mut self,
        loader: &dyn DataLoader<Inner<LC>, ValidInputOf<LC>>,
        global: &Progress,
    ) -> Result<bool> {
        let epoch = global.items_processed;
        let model = self.learner.model().valid();
        let iterator = self.panics.guard("the validation data loader", || loader.iter())?;
        let panics = self.panics.clone();
        let mut lockstep = Lockstep::new(iterator, &self.ddp.group, Uneven::Join)
            .explained_by(move |message| panics.behind(message));
        let (mut iteration, mut stopped) = (0, false);
        while let Some(turn) = self.panics.quietly(|| lockstep.next(self.wants_to_stop()))? {
            iteration += 1;
            let Turn { batch, progress, stop, .. } = turn;
            let output = match batch {
                Some(batch) => Some(self.panics.guard("the validation step", || model.step(batch))?),
                None => None,
            };
            if let Some(item) = self.gather(output, epoch, iteration)? {
                let item = TrainingItem::new(item, progress, global.clone(), Some(iteration), None);
                self.events.valid(LearnerEvent::ProcessedItem(item))?;
            }
            if stop {
                self.stopping(epoch, iteration)?;
                stopped = true;
            }
        }
        self.events.valid(LearnerEvent::EndEpoch(epoch))?;
        Ok(stopped)
    }

    /// The output of the global batch, on rank 0. `items`, `parts` and `join` are the user's.
    fn gather<O: DdpOutput>(&self, output: Option<O>, epoch: usize, iteration: usize) -> Result<Option<O>> {
        let gathered = self.panics.guard("the output", || self.outputs.gather(output));
        gathered.flatten().map_err(|error| error.context(format!("in epoch {epoch}, iteration {iteration}")))
    }
}
