//! One process's copy of the model, kept equal to all others.
//!
//! Equality is not hoped for but made and checked: at start-up all ranks compare what they are about to train,
//! take rank 0's values and ids, and compare hashes; from then on equal gradients keep equal parameters equal,
//! and a check every so many steps finds what does not (a user who replaced a parameter, a rank that trains
//! alone).

use std::sync::Arc;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::{GradientsParams, Optimizer};
use burn::record::{BinBytesRecorder, DoublePrecisionSettings, Recorder};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::{Scalar, TensorMetadata};

use crate::bucket::{BucketPlan, ParamRole, ParamSpec};
use crate::error::{Error, ErrorKind, Result};
use crate::norm;
use crate::parameters;
use crate::process_group::ProcessGroup;
use crate::rank::Rank;
use crate::reducer::{Reducer, Reduction, SharedReducer, TURN_OFF};

mod agreement;
mod buffers;
#[cfg(feature = "overlap")]
mod marks;
mod options;
mod overlap;
mod reproducible;
mod step;

pub use agreement::verify_parameters;
pub use buffers::BufferSync;
pub use options::ReplicaOptions;
pub use reproducible::Reproducibility;
pub use step::{MicroStep, Reduced};

pub use crate::reducer::OverlapStats;

use reproducible::seed_of;

/// One process's copy of the model. See the [module documentation](self).
pub struct Replica<B: AutodiffBackend> {
    group: ProcessGroup<B::InnerBackend>,
    options: ReplicaOptions,
    specs: Vec<ParamSpec>,
    ids: Vec<ParamId>,
    plan: BucketPlan,
    /// Shared with the backward pass.
    reducer: Arc<SharedReducer<B::InnerBackend>>,
    /// Optimizer steps reduced so far.
    steps: usize,
    warned: bool,
    /// Whether the specifications are final: in a world of one the first forward pass initializes what is lazy.
    settled: bool,
}

impl<B: AutodiffBackend> Replica<B> {
    /// Makes `model` equal on all ranks and returns it with the replica that keeps it so. All ranks call it
    /// with the same model and options, before the optimizer sees the model: other ranks' parameters take rank
    /// 0's values and ids.
    ///
    /// In a world of one `model` is returned as it is; with [`GroupOptions::connect_alone`](crate::GroupOptions::connect_alone)
    /// its parameters are initialized here.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] on all ranks, naming the first parameter that differs in path, shape or dtype
    /// and the ranks; any error of the group.
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
        let any_world_size = reproducibility != Reproducibility::FixedWorldSize;
        let model =
            if group.world_size() == 1 { model } else { agreement::align::<B, M>(model, group, &options)? };
        let settled = any_world_size || group.is_connected();
        if settled {
            // Values that are drawn late would be drawn from the stream of the first micro-step, and buckets whose shapes
            // come late cannot leave early.
            parameters::collect::<B, M>(&model)?;
        }
        let order = reproducibility.order(&options);
        let mut replica = Self {
            group: group.clone(),
            plan: BucketPlan::default(),
            reducer: Arc::new(SharedReducer::new(Reducer::new(Vec::new(), None, options.reduction, order))),
            options,
            specs: Vec::new(),
            ids: Vec::new(),
            steps: 0,
            warned: false,
            settled,
        };
        replica.look_at(&model);
        reproducibility.check_parameters(&replica.specs).map_err(|error| group.barrier_then(error))?;
        replica.seed_next();
        tracing::debug!("{} reduces\n{}", group.rank(), replica.plan());
        #[cfg(feature = "overlap")]
        let model = replica.begin_overlap(model);
        Ok((model, replica))
    }

    fn look_at<M: AutodiffModule<B>>(&mut self, model: &M) {
        let params = parameters::describe::<B, M>(model);
        self.ids = params.iter().map(|param| param.id).collect();
        self.specs = params.into_iter().map(|param| param.spec).collect();
        let order = self.options.reproducibility.order(&self.options);
        let reducer =
            Reducer::new(self.specs.clone(), self.options.bucket_bytes, self.options.reduction, order)
                .with_buckets_in_flight(self.options.buckets_in_flight)
                .with_accumulation(self.options.accumulation);
        self.plan = reducer.plan().clone();
        #[cfg(feature = "overlap")]
        let reducer = if self.overlaps() { reducer.with_overlap(self.group.clone()) } else { reducer };
        *self.reducer.lock() = reducer;
    }

    /// Sets the random stream of the micro-step to come, where it is to be the same for every number of ranks.
    fn seed_next(&self) {
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

    /// Which parameters travel together; with the feature `overlap` in another order after the first step.
    pub fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// Adds a micro-step to the accumulation window without any communication. Every micro-step of a window but
    /// the last goes here; the last goes to [`Replica::reduce`].
    pub fn no_sync<M: AutodiffModule<B>>(
        &mut self,
        model: &M,
        micro_step: impl Into<MicroStep<B>>,
    ) -> Result<()> {
        let goes_on = self.reducer.lock().continue_window();
        let added = goes_on.and_then(|()| self.add(model, micro_step.into()));
        added.map_err(|error| self.give_up(error))?;
        self.mark(model);
        self.seed_next();
        Ok(())
    }

    /// Adds the window's last micro-step and reduces the window over all ranks: the gradient of the global
    /// batch, its loss and its norm, equal on all ranks. One collective a bucket, and none besides but those
    /// of options that say so; with the feature `overlap` one small broadcast in the first step.
    ///
    /// # Errors
    /// Any error of the group, naming rank, operation and bucket; an error of this rank (a changed set of
    /// parameters, a wrong weight) ends the group, so that the others do not wait for it.
    pub fn reduce<M: AutodiffModule<B>>(
        &mut self,
        model: &M,
        micro_step: impl Into<MicroStep<B>>,
    ) -> Result<Reduced> {
        let reduced = self.add(model, micro_step.into()).and_then(|()| {
            let reduction = self.reducer.lock().reduce(&self.group)?;
            // Not before it: during the backward pass ranks may have sent different numbers of buckets.
            let due = |every: usize| self.steps == 1 || (self.steps > 0 && self.steps.is_multiple_of(every));
            if self.options.check_every.is_some_and(due) {
                verify_parameters::<B, M>(model, &self.group, self.steps)?;
            }
            self.look_at_usage(&reduction)?;
            #[cfg(feature = "overlap")]
            self.follow_arrivals()?;
            self.finish(reduction)
        });
        self.steps += 1;
        let reduced = reduced.map_err(|error| self.give_up(error))?;
        // For parameters that the optimizer leaves as they are.
        self.mark(model);
        self.seed_next();
        Ok(reduced)
    }

    /// Forgets the micro-steps since the last reduction, for a window that is not to become an optimizer step. All
    /// ranks must call it. With overlap it comes before the window's last backward pass: buckets that have been sent
    /// cannot be taken back, and the next call returns an error that says so.
    pub fn discard(&mut self) {
        self.reducer.lock().discard();
        self.seed_next();
    }

    /// Ends the group with this rank's error, and the window with it.
    fn give_up(&mut self, error: Error) -> Error {
        self.group.fail(&error);
        self.reducer.lock().reset();
        error
    }

    /// Compares the parameters of all ranks by hash, whatever [`ReplicaOptions::check_every`] says; see
    /// [`verify_parameters`]. All ranks must call it.
    pub fn verify<M: AutodiffModule<B>>(&self, model: &M) -> Result<()> {
        verify_parameters::<B, M>(model, &self.group, self.steps)
    }

    /// Makes the running states of `model` (the statistics of normalization layers) equal on all ranks, bit for
    /// bit. They are no gradients: each rank's follow its own batches, and whoever evaluates or saves the model
    /// wants one set. All ranks must call it, between optimizer steps. What is equal already is left as it is.
    ///
    /// Without running states, and in a world of one, nothing is done and nothing sent.
    pub fn sync_buffers<M: AutodiffModule<B>>(&self, model: &M, how: BufferSync) -> Result<()> {
        if self.group.world_size() == 1 {
            return Ok(());
        }
        buffers::sync::<B, M>(model, &self.group, how).inspect_err(|error| self.group.fail(error))
    }

    /// A hash over all parameters of `model` except running states.
    pub fn parameter_hash<M: AutodiffModule<B>>(&self, model: &M) -> Result<u64> {
        agreement::hash::<B, M>(model)
    }

    /// Gives every rank rank 0's optimizer state, for example after rank 0 has loaded a checkpoint. All ranks
    /// call it with the same kind of optimizer. The state passes through a record in double precision, on rank
    /// 0 too, so that all ranks end with the same.
    pub fn broadcast_optimizer<M, O>(&self, optimizer: O, model: &M) -> Result<O>
    where
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let _ = model;
        if self.group.world_size() == 1 {
            return Ok(optimizer);
        }
        let recorder = BinBytesRecorder::<DoublePrecisionSettings>::default();
        let failed = |what: &str, error: String| {
            Error::with_source(ErrorKind::Io, format!("cannot {what} the optimizer state"), error)
        };
        let mine = if self.group.rank().is_root() {
            let bytes = Recorder::<B>::record(&recorder, optimizer.to_record(), ());
            bytes
                .map_err(|error| failed("save", error.to_string()))
                .inspect_err(|error| self.group.fail(error))?
        } else {
            Vec::new()
        };
        let bytes = self.group.broadcast_bytes(&mine, Rank(0))?;
        let device = self.group.device();
        let record = Recorder::<B>::load(&recorder, bytes, device)
            .map_err(|error| failed("load", error.to_string()))
            .inspect_err(|error| self.group.fail(error))?;
        Ok(optimizer.load_record(record))
    }

    fn add<M: AutodiffModule<B>>(&mut self, model: &M, micro_step: MicroStep<B>) -> Result<()> {
        let MicroStep { mut gradients, loss, weight } = micro_step;
        let ids = parameters::ids::<B, M>(model);
        if !self.settled && ids == self.ids {
            self.look_at(model);
            self.settled = true;
        }
        if let Some(position) = (0..ids.len().max(self.ids.len())).find(|i| ids.get(*i) != self.ids.get(*i)) {
            let path = self.specs.get(position).map_or("a new parameter", |spec| spec.path.as_str());
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "the parameter set changed at `{path}` after the replica was made: \
                     make a new replica with the changed model"
                ),
            ));
        }
        let mut list = Vec::new();
        let shared = self.reducer.clone();
        let mut reducer = shared.lock();
        reducer.check()?;
        for (index, (id, spec)) in ids.iter().zip(&self.specs).enumerate() {
            let gradient = gradients.remove::<B::InnerBackend, 1>(*id);
            if reducer.has_taken(index) {
                let left = gradient.map(|left| left.into_primitive().tensor().shape().num_elements());
                if left != Some(0) {
                    return Err(overlap::other_backward(spec, left.is_some()));
                }
                continue;
            }
            let Some(gradient) = gradient else { continue };
            if spec.role != ParamRole::Trained {
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    format!(
                        "{spec} has a gradient: it was not trained when the replica was made; make a new one"
                    ),
                ));
            }
            let gradient = gradient.into_primitive().tensor();
            if gradient.shape().to_vec() != spec.shape {
                let shape = gradient.shape();
                if shape.num_elements() == 0 {
                    return Err(Error::config(format!(
                        "the gradient of {spec} was taken in a backward pass of another micro-step: hand each micro-step \
                         over once, or {TURN_OFF}"
                    )));
                }
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    format!("the gradient of {spec} has shape {shape:?}"),
                ));
            }
            list.push((index, gradient));
        }
        if !gradients.is_empty() {
            return Err(Error::config(format!(
                "{} gradients belong to no parameter of the model: pass the model they were made from",
                gradients.len()
            )));
        }
        reducer.add(list, loss.map(|loss| loss.into_primitive().tensor()), weight)
    }

    /// In strict mode an error, else one warning, for parameters that not all ranks used. Every rank sees the
    /// same counts, so all of them come here together and can ask each other who lacks what.
    fn look_at_usage(&mut self, reduction: &Reduction<B::InnerBackend>) -> Result<()> {
        let strict = self.options.strict;
        let mut concerned = reduction.partly_used.clone();
        if strict && !reduction.empty {
            let unused = |index: &usize| {
                self.specs[*index].role == ParamRole::Trained && reduction.gradients[*index].is_none()
            };
            concerned.extend((0..self.specs.len()).filter(unused));
            concerned.sort_unstable();
        }
        if concerned.is_empty() || (self.warned && !strict) {
            return Ok(());
        }
        let flags = reduction.used_here.iter().map(|used| u8::from(*used)).collect();
        let all = self.group.all_gather_bytes(flags)?;
        let lines: Vec<_> = concerned
            .iter()
            .map(|&index| {
                let lacks = |rank: &usize| all[*rank].get(index) != Some(&1);
                let ranks: Vec<_> = (0..all.len()).filter(lacks).map(|rank| Rank(rank).to_string()).collect();
                format!("{} on {}", self.specs[index], ranks.join(", "))
            })
            .collect();
        let text = format!("no gradient in optimizer step {} for {}", self.steps, lines.join("; "));
        if strict {
            return Err(self.group.barrier_then(Error::new(ErrorKind::Mismatch, text)));
        }
        self.warned = true;
        if self.group.rank().is_root() {
            tracing::warn!("{text}: taken as zero there (said once)");
        }
        Ok(())
    }

    /// Norm, clipping, and the gradients under their ids.
    fn finish(&self, mut reduction: Reduction<B::InnerBackend>) -> Result<Reduced> {
        let norm = match (self.options.clip_norm, self.options.report_norm) {
            (None, false) => None,
            _ => Some(self.norm(&mut reduction)?),
        };
        let factor = match (norm, self.options.clip_norm) {
            (Some(norm), Some(limit)) if norm > limit => Some(limit / norm),
            _ => None,
        };
        let mut grads = GradientsParams::new();
        for (id, gradient) in self.ids.iter().zip(reduction.gradients) {
            let Some(gradient) = gradient else { continue };
            let gradient = match factor {
                Some(factor) => B::InnerBackend::float_mul_scalar(gradient, Scalar::from(factor)),
                None => gradient,
            };
            let gradient = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(gradient));
            grads.register(*id, gradient);
        }
        Ok(Reduced { grads, loss: reduction.loss, norm })
    }

    fn norm(&self, reduction: &mut Reduction<B::InnerBackend>) -> Result<f64> {
        if self.group.in_host_memory() || self.options.reproducibility != Reproducibility::FixedWorldSize {
            return norm::through_host::<B::InnerBackend>(&mut reduction.gradients);
        }
        let mine = norm::on_device::<B::InnerBackend>(&reduction.gradients)?;
        if self.group.world_size() == 1 {
            return Ok(mine);
        }
        let rank_0 = self.group.broadcast_bytes(&mine.to_le_bytes(), Rank(0))?;
        let norm = rank_0.try_into().map(f64::from_le_bytes);
        norm.map_err(|_| Error::new(ErrorKind::Mismatch, "rank 0 sent no norm"))
    }
}
