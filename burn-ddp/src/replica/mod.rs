//! One process's copy of the model, kept equal to all others.
//!
//! Equality is made and checked. At start-up all ranks compare the parameters they are about to train, take rank 0's
//! values and ids, and compare hashes. From then on equal gradients keep equal parameters equal, and a check every so
//! many steps ([`ReplicaOptions::check_every`]) finds the exceptions: a program that replaced a parameter, a rank that
//! trains alone.

use std::sync::Arc;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::Optimizer;
use burn::tensor::backend::AutodiffBackend;
use burn_ddp_comm::{Error, Result};

use crate::bucket::BucketPlan;
use crate::parameters;
use crate::process_group::ProcessGroup;
use crate::reducer::SharedReducer;

mod agreement;
mod buffers;
mod gradients;
#[cfg(feature = "overlap")]
mod marks;
mod micro_step;
mod options;
mod overlap;
#[cfg(feature = "overlap")]
pub(crate) mod registry;
mod reproducible;
mod unused;

pub use agreement::verify_parameters;
pub use buffers::BufferSync;
pub use micro_step::{MicroStep, Reduced};
pub use options::ReplicaOptions;
pub use reproducible::Reproducibility;
#[cfg(feature = "train")]
pub(crate) use reproducible::split_mix64;

pub use crate::reducer::OverlapStats;

use options::build_reducer;
use reproducible::seed_of;
use unused::UnusedCheck;

/// One process's copy of the model. See the [module documentation](self).
///
/// ```no_run
/// use burn::nn::LinearConfig;
/// use burn::optim::{GradientsParams, Optimizer, SgdConfig};
/// use burn::tensor::{Tensor, backend::AutodiffBackend};
/// use burn_ddp::{MicroStep, ProcessGroup, Replica, ReplicaOptions, Result};
///
/// /// Trains on windows of four micro-steps of eight items.
/// fn train<B: AutodiffBackend>(group: &ProcessGroup<B::InnerBackend>) -> Result<()> {
///     let device = Default::default();
///     let model = LinearConfig::new(2, 1).init::<B>(&device);
///     let (mut model, mut replica) = Replica::new(model, group, ReplicaOptions::new().with_accumulation(4))?;
///     let mut optimizer = SgdConfig::new().init();
///     for _ in 0..100 {
///         let micro_step = |model: &burn::nn::Linear<B>| {
///             let loss = model.forward(Tensor::<B, 2>::ones([8, 2], &device)).mean();
///             MicroStep::new(GradientsParams::from_grads(loss.backward(), model)).with_loss(loss)
///         };
///         for _ in 0..3 {
///             replica.no_sync(&model, micro_step(&model))?;
///         }
///         let reduced = replica.reduce(&model, micro_step(&model))?;
///         model = optimizer.step(0.1, model, reduced.grads);
///     }
///     replica.verify(&model)
/// }
/// ```
pub struct Replica<B: AutodiffBackend> {
    group: ProcessGroup<B::InnerBackend>,
    options: ReplicaOptions,
    /// Of all parameters, in visit order.
    ids: Vec<ParamId>,
    /// Shared with Burn's hook. It owns the parameters' specifications and the plan of buckets.
    reducer: Arc<SharedReducer<B::InnerBackend>>,
    /// Optimizer steps reduced so far.
    steps: usize,
    unused: UnusedCheck,
    /// False while lazy parameters may be uninitialized: in a world of one the first forward pass initializes them.
    has_final_specs: bool,
}

impl<B: AutodiffBackend> Replica<B> {
    /// Makes `model` equal on all ranks and returns it with the replica that keeps it so. All ranks call it
    /// with the same model and options, before the optimizer sees the model: other ranks' parameters take rank
    /// 0's values and ids.
    ///
    /// In a world of one `model` is returned as it is; with
    /// [`GroupOptions::connect_alone`](crate::GroupOptions::connect_alone) its parameters are initialized here.
    ///
    /// # Errors
    /// [`Mismatch`](crate::ErrorKind::Mismatch) on all ranks, naming the first parameter that differs in path, shape or
    /// dtype and the ranks; options that cannot be meant; any error of the group.
    pub fn new<M: AutodiffModule<B>>(
        model: M,
        group: &ProcessGroup<B::InnerBackend>,
        options: ReplicaOptions,
    ) -> Result<(M, Self)> {
        let made = Self::make(model, group, options);
        made.inspect_err(|error| group.fail(error))
    }

    fn make<M: AutodiffModule<B>>(
        model: M,
        group: &ProcessGroup<B::InnerBackend>,
        options: ReplicaOptions,
    ) -> Result<(M, Self)> {
        options.check()?;
        let reproducibility = options.reproducibility;
        reproducibility.check(&options, group.world_size(), group.in_host_memory())?;
        let model =
            if group.world_size() == 1 { model } else { agreement::align::<B, M>(model, group, &options)? };
        let has_final_specs = group.is_connected() || reproducibility != Reproducibility::FixedWorldSize;
        if has_final_specs {
            // Initializes all parameters: values that are drawn late would be drawn from the stream of the first
            // micro-step, and buckets whose shapes come late cannot leave early.
            parameters::collect::<B, M>(&model)?;
        }
        let (ids, reducer) = build_reducer::<B, M>(&model, group, &options);
        reproducibility.check_parameters(reducer.specs()).map_err(|error| group.barrier_then(error))?;
        tracing::debug!("{} reduces\n{}", group.rank(), reducer.plan());
        let replica = Self {
            group: group.clone(),
            unused: UnusedCheck::new(options.strict),
            options,
            ids,
            reducer: Arc::new(SharedReducer::new(reducer)),
            steps: 0,
            has_final_specs,
        };
        replica.seed_next_micro_step();
        let model = replica.register(model);
        Ok((model, replica))
    }

    /// Sets the random stream of the next micro-step, where it has to be the same for every number of ranks.
    fn seed_next_micro_step(&self) {
        if let (Reproducibility::AnyWorldSize { seed }, Some(accumulation)) =
            (self.options.reproducibility, self.options.accumulation)
        {
            let micro = self.group.rank().0 * accumulation + self.reducer.lock().micro_steps();
            B::seed(self.group.device(), seed_of(seed, self.steps as u64, micro as u64));
        }
    }

    /// The group it reduces over.
    pub fn group(&self) -> &ProcessGroup<B::InnerBackend> {
        &self.group
    }

    /// The buckets in which gradients travel; with the feature `overlap`, in another order after the first step.
    pub fn plan(&self) -> BucketPlan {
        self.reducer.lock().plan().clone()
    }

    /// Adds a micro-step to the accumulation window without any communication. Every micro-step of a window but
    /// the last goes here; the last goes to [`Replica::reduce`].
    ///
    /// # Errors
    /// A micro-step that cannot be added (see [`Replica::reduce`]), and with overlap one whose gradients were sent
    /// already because it was expected to be the window's last. The error ends the group.
    pub fn no_sync<M: AutodiffModule<B>>(
        &mut self,
        model: &M,
        micro_step: impl Into<MicroStep<B>>,
    ) -> Result<()> {
        let continues = self.reducer.lock().continue_window();
        let added = continues.and_then(|()| self.add(model, micro_step.into()));
        added.map_err(|error| self.give_up(error))?;
        self.mark(model);
        self.seed_next_micro_step();
        Ok(())
    }

    /// Adds the window's last micro-step and reduces the window over all ranks: the gradient of the global
    /// batch, its loss and its norm, equal on all ranks. One collective a bucket. Besides these: a small gather
    /// the first time that some ranks lack a gradient (each time in strict mode), those of options that say so, and
    /// with the feature `overlap` one small broadcast in the first step.
    ///
    /// # Errors
    /// Any error of the group, naming rank, operation and bucket; an error of this rank (a changed set of
    /// parameters, a wrong weight) ends the group, so that the others do not wait for it.
    pub fn reduce<M: AutodiffModule<B>>(
        &mut self,
        model: &M,
        micro_step: impl Into<MicroStep<B>>,
    ) -> Result<Reduced> {
        let reduced = self.add(model, micro_step.into()).and_then(|()| self.reduce_window(model));
        self.steps += 1;
        let reduced = reduced.map_err(|error| self.give_up(error))?;
        // For parameters that the optimizer does not change, whose marks it does not renew.
        self.mark(model);
        self.seed_next_micro_step();
        Ok(reduced)
    }

    /// Discards the micro-steps since the last reduction, for a window that is not to become an optimizer step. All
    /// ranks must call it. With overlap it comes before the window's last backward pass: buckets that have been sent
    /// cannot be taken back, and the next call returns an error that says so.
    pub fn discard(&mut self) {
        self.reducer.lock().discard();
        self.seed_next_micro_step();
    }

    /// Compares the parameters of all ranks by hash, independently of [`ReplicaOptions::check_every`]; see
    /// [`verify_parameters`]. All ranks must call it.
    ///
    /// # Errors
    /// [`Diverged`](crate::ErrorKind::Diverged) naming the first parameter that differs and the ranks, on every rank;
    /// any error of the group.
    pub fn verify<M: AutodiffModule<B>>(&self, model: &M) -> Result<()> {
        verify_parameters::<B, M>(model, &self.group, self.steps)
    }

    /// Makes the running states of `model` (the statistics of normalization layers) equal on all ranks, bit for
    /// bit. They are not reduced with gradients: each rank's follow its own batches, and evaluating or saving the model
    /// needs one set. All ranks must call it, between optimizer steps. States that are equal already are left alone.
    ///
    /// Without running states, and in a world of one, nothing is done and nothing sent.
    ///
    /// # Errors
    /// [`Mismatch`](crate::ErrorKind::Mismatch) if ranks have different numbers of running states; any error of the
    /// group.
    pub fn sync_buffers<M: AutodiffModule<B>>(&self, model: &M, how: BufferSync) -> Result<()> {
        if self.group.world_size() == 1 {
            return Ok(());
        }
        buffers::sync::<B, M>(model, &self.group, how).inspect_err(|error| self.group.fail(error))
    }

    /// A hash over all parameters of `model` except running states.
    ///
    /// # Errors
    /// A parameter whose element type cannot be sent or read.
    pub fn parameter_hash<M: AutodiffModule<B>>(&self, model: &M) -> Result<u64> {
        agreement::hash::<B, M>(model)
    }

    /// Gives every rank rank 0's optimizer state, for example after rank 0 has loaded a checkpoint. All ranks
    /// call it with the same kind of optimizer. The state passes through a record in double precision, on rank
    /// 0 too, so that all ranks end with the same.
    ///
    /// # Errors
    /// A state that cannot be saved or loaded; any error of the group.
    pub fn broadcast_optimizer<M, O>(&self, optimizer: O, model: &M) -> Result<O>
    where
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let _ = model;
        if self.group.world_size() == 1 {
            return Ok(optimizer);
        }
        agreement::broadcast_optimizer(optimizer, &self.group)
    }

    /// Adds a micro-step to the window.
    fn add<M: AutodiffModule<B>>(&mut self, model: &M, micro_step: MicroStep<B>) -> Result<()> {
        let ids = parameters::ids::<B, M>(model);
        if !self.has_final_specs && ids == self.ids {
            *self.reducer.lock() = build_reducer::<B, M>(model, &self.group, &self.options).1;
            self.has_final_specs = true;
        }
        let mut reducer = self.reducer.lock();
        gradients::check_ids(&self.ids, &ids, reducer.specs())?;
        reducer.take_error()?;
        let MicroStep { gradients, loss, weight } = micro_step;
        let gradients = gradients::take::<B>(gradients, &ids, &reducer)?;
        reducer.add(gradients, loss.map(|loss| loss.into_primitive().tensor()), weight)
    }

    fn reduce_window<M: AutodiffModule<B>>(&mut self, model: &M) -> Result<Reduced> {
        let reduction = self.reducer.lock().reduce()?;
        // Other collectives come after it: in the backward pass ranks may have sent different numbers of buckets.
        let due = |every: usize| self.steps == 1 || (self.steps > 0 && self.steps.is_multiple_of(every));
        if self.options.check_every.is_some_and(due) {
            verify_parameters::<B, M>(model, &self.group, self.steps)?;
        }
        self.unused.check(&reduction, self.reducer.lock().specs(), &self.group, self.steps)?;
        self.follow_arrivals()?;
        gradients::clip::<B>(reduction, &self.ids, &self.group, &self.options)
    }

    /// Ends the group with this rank's error, and the window with it.
    fn give_up(&mut self, error: Error) -> Error {
        self.group.fail(&error);
        self.reducer.lock().drop_window();
        error
    }
}
