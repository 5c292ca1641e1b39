//! One epoch over one split, in step on all ranks.
//!
//! ```text
//! round of Lockstep:   each rank has a batch, a placeholder batch, or none
//!   micro-step         forward and backward; without items an empty micro-step
//!     window complete  reduce gradients, optimizer step
//!     otherwise        add gradients to the window
//!   gather             output of the global batch -> events of rank 0
//! ```
//!
//! A window is the micro-steps of one optimizer step. `Lockstep` announces the last round of the epoch, so an
//! incomplete window is flushed in it or dropped after it.

use burn::data::dataloader::{DataLoader, Progress};
use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::train::{InferenceStep, LearnerEvent, LearningComponentsTypes, TrainOutput, TrainingItem};
use burn_ddp_comm::{Error, Result};

use super::options::{BufferPolicy, IncompleteWindow};
use super::output::DdpOutput;
use super::session::Session;
use super::types::{Inner, TrainInputOf, TrainOutputOf, ValidInputOf, ValidOutputOf};
use crate::data::{Lockstep, Round, Uneven};
use crate::parameters;
use crate::replica::MicroStep;

/// A micro-step of this rank and the output of its batch, if it had one.
type Computed<LC> = (MicroStep<<LC as LearningComponentsTypes>::Backend>, Option<TrainOutputOf<LC>>);

impl<LC> Session<'_, LC>
where
    LC: LearningComponentsTypes,
    TrainOutputOf<LC>: DdpOutput,
    ValidOutputOf<LC>: DdpOutput,
{
    /// Trains on all batches of the epoch that `global` counts. With `placeholders`, the loader gives ranks without
    /// items a batch to run the forward pass on. Returns true if the ranks agreed on a stop.
    pub(super) fn train_epoch(
        &mut self,
        loader: &dyn DataLoader<LC::Backend, TrainInputOf<LC>>,
        global: &Progress,
        placeholders: bool,
    ) -> Result<bool> {
        let epoch = global.items_processed;
        let mut lockstep = self.lockstep("the data loader", loader, self.ddp.options.uneven)?;
        if self.accumulation == 1 {
            lockstep = lockstep.without_looking_ahead();
        }
        let (mut iteration, mut window, mut stopped) = (0, 0, false);
        while let Some(round) = self.panics.quietly(|| lockstep.next(self.requests_stop()))? {
            iteration += 1;
            window += 1;
            if window == 1 {
                self.begin_window();
            }
            let Round { batch, items, last, stop, progress, .. } = round;
            let completes =
                window == self.accumulation || (last && self.ddp.options.window == IncompleteWindow::Flush);
            let weight = self.weight_ahead(items);
            self.replica.expect(&self.learner.model(), completes, weight)?;
            let is_placeholder = placeholders && items == 0;
            let (micro_step, output) = self.compute(batch, is_placeholder, items, iteration)?;
            self.apply(micro_step, completes)?;
            if completes {
                window = 0;
            }
            if let Some(item) = self.gather(output, epoch, iteration)? {
                let lr = Some(self.learner.lr_current());
                let item = TrainingItem::new(item, progress, global.clone(), Some(iteration), lr);
                self.events.train(LearnerEvent::ProcessedItem(item))?;
            }
            if stop {
                self.stop(epoch, iteration)?;
                stopped = true;
            }
        }
        drop(lockstep);
        self.drop_incomplete_window();
        self.events.train(LearnerEvent::EndEpoch(epoch))?;
        Ok(stopped)
    }

    /// Validates on all batches of the epoch that `global` counts. Returns true if the ranks agreed on a stop.
    pub(super) fn valid_epoch(
        &mut self,
        loader: &dyn DataLoader<Inner<LC>, ValidInputOf<LC>>,
        global: &Progress,
    ) -> Result<bool> {
        let epoch = global.items_processed;
        let model = self.learner.model().valid();
        let mut lockstep = self.lockstep("the validation data loader", loader, Uneven::Join)?;
        let (mut iteration, mut stopped) = (0, false);
        while let Some(round) = self.panics.quietly(|| lockstep.next(self.requests_stop()))? {
            iteration += 1;
            let Round { batch, progress, stop, .. } = round;
            let output = match batch {
                Some(batch) => Some(self.panics.guard("the validation step", || model.step(batch))?),
                None => None,
            };
            if let Some(item) = self.gather(output, epoch, iteration)? {
                let item = TrainingItem::new(item, progress, global.clone(), Some(iteration), None);
                self.events.valid(LearnerEvent::ProcessedItem(item))?;
            }
            if stop {
                self.stop(epoch, iteration)?;
                stopped = true;
            }
        }
        self.events.valid(LearnerEvent::EndEpoch(epoch))?;
        Ok(stopped)
    }

    fn lockstep<'l, B: Backend, O>(
        &self,
        name: &str,
        loader: &'l dyn DataLoader<B, O>,
        uneven: Uneven,
    ) -> Result<Lockstep<'l, Inner<LC>, O>> {
        let iterator = self.panics.guard(name, || loader.iter())?;
        let panics = self.panics.clone();
        let lockstep = Lockstep::new(iterator, &self.ddp.group, uneven);
        Ok(lockstep.with_cause_of_panics(move |message| panics.cause_of(message)))
    }

    fn begin_window(&mut self) {
        let may_be_dropped = self.accumulation > 1 && self.ddp.options.window == IncompleteWindow::Drop;
        self.before_window = may_be_dropped.then(|| self.learner.clone());
        self.learner.lr_step();
    }

    fn drop_incomplete_window(&mut self) {
        self.replica.discard();
        // Such a window has advanced the learning rate schedule, which a checkpoint must not contain.
        if let Some(before) = self.before_window.take() {
            self.learner = before;
        }
    }

    /// Weight of a micro-step of `items` items, if it is known before the step: the output type states that the weight
    /// is the number of items, and no micro-step so far has contradicted it.
    fn weight_ahead(&self, items: usize) -> Option<f64> {
        let known = <TrainOutputOf<LC> as DdpOutput>::WEIGHT_IS_ITEMS && self.weight_was_items == Some(true);
        (known && !self.is_plain()).then_some(items as f64)
    }

    /// Runs forward and backward pass of this rank's batch, of `items` items as the loader counts.
    fn compute(
        &mut self,
        batch: Option<TrainInputOf<LC>>,
        is_placeholder: bool,
        items: usize,
        iteration: usize,
    ) -> Result<Computed<LC>> {
        let Some(batch) = batch else {
            if self.forward_communicates() {
                return Err(Error::config(format!(
                    "{} has no batch for iteration {iteration}, but the model has synchronized batch \
                     normalization, whose forward pass needs all ranks: build the loader with \
                     `burn_ddp::data::DataLoaderBuilder`, or give `Uneven::Truncate`",
                    self.ddp.group.rank()
                )));
            }
            return Ok((MicroStep::empty(), None));
        };
        if is_placeholder {
            self.run_placeholder(batch)?;
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

    /// Runs a placeholder batch, so that `SyncBatchNorm` peers do not block. Synchronized layers move their running
    /// states by the statistics of the other ranks, which is right; the other running states are restored.
    fn run_placeholder(&mut self, batch: TrainInputOf<LC>) -> Result<()> {
        let model = self.learner.model();
        let before = parameters::states::<LC::Backend, _>(&model)?;
        self.sync.set_absent(true);
        let learner = &self.learner;
        let output = self.panics.guard("the training step", || drop(learner.train_step(batch)));
        self.sync.set_absent(false);
        output?;
        let moved = self.sync.take_moved();
        // Applies pending updates, which would otherwise overwrite the restored states.
        let _ = model.valid();
        let restored = before.into_iter().filter(|(_, state)| !moved.contains(&state.id));
        let restored = restored.filter_map(|(position, state)| Some((position, state.tensor?))).collect();
        parameters::set_running_states::<LC::Backend, _>(&model, restored)
    }

    /// Adds the micro-step to the window, and makes the optimizer step if it `completes` the window.
    fn apply(&mut self, micro_step: MicroStep<LC::Backend>, completes: bool) -> Result<()> {
        let model = self.learner.model();
        if !completes {
            self.replica.no_sync(&model, micro_step)?;
            return Ok(());
        }
        let reduced = self.replica.reduce(&model, micro_step)?;
        drop(model);
        self.optimize(reduced.grads)
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

    /// Returns the output of the global batch on rank 0. `items`, `parts` and `join` are the user's code, so it is
    /// guarded.
    fn gather<O: DdpOutput>(&self, output: Option<O>, epoch: usize, iteration: usize) -> Result<Option<O>> {
        let gathered = self.panics.guard("the output", || self.outputs.gather(output));
        gathered.flatten().map_err(|error| error.context(format!("in epoch {epoch}, iteration {iteration}")))
    }
}
