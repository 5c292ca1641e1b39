//! [`SyncGroup`]: a process group as layers hold it, without a backend type.
//!
//! Data flow of a collective: `Tensor<B, 1>` of any backend -> `&mut dyn Any` -> the group downcasts it to its own
//! backend `G` or to `Autodiff<G, ..>`, runs the collective, and replaces the tensor.

use std::any::{Any, TypeId, type_name};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
use burn::module::{Module, ModuleVisitor, Param, ParamId, RunningState};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_ddp_comm::{Error, Rank, Result};

use super::differentiable::{CollectiveKind, GraphCollective};
use crate::process_group::ProcessGroup;

/// State that the layers of a group share with the training loop; kept with the group.
#[derive(Debug, Default)]
pub(crate) struct SyncState {
    /// Cloned into every handle, and so into every layer.
    alive: Arc<()>,
    absent: AtomicBool,
    /// Running states that layers have moved while absent.
    moved: Mutex<Vec<ParamId>>,
}

impl SyncState {
    /// Number of handles to the group, those of layers included. Above zero, forward passes may communicate, and a rank
    /// without items must run one on any batch, with [`SyncState::set_absent`].
    pub(crate) fn modules(&self) -> usize {
        Arc::strong_count(&self.alive) - 1
    }

    /// Does [`SyncGroup::set_absent`].
    pub(crate) fn set_absent(&self, absent: bool) {
        self.absent.store(absent, Ordering::Relaxed);
    }

    /// Takes the running states that layers of the group have moved while this rank was absent. They have moved by the
    /// statistics of the other ranks, which is right; all others have moved by a placeholder batch.
    pub(crate) fn take_moved(&self) -> Vec<ParamId> {
        std::mem::take(&mut *self.moved.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Handle to a process group for layers that communicate in their forward pass. Clones are handles to the same group.
///
/// It has no backend type, so a model that is generic over its backend can hold it. The backend of a layer is checked
/// when the layer is created: it must be the group's own backend, or `Autodiff` of it with either of Burn's
/// checkpointing strategies.
///
/// ```no_run
/// use burn_ddp::nn::{SyncBatchNorm, SyncBatchNormConfig, SyncGroup};
/// # use burn::tensor::backend::AutodiffBackend;
/// # use burn_ddp::ProcessGroup;
/// # type Device<B> = <B as burn::tensor::backend::BackendTypes>::Device;
///
/// # fn init<B: AutodiffBackend>(group: ProcessGroup<B::InnerBackend>, device: Device<B>) -> burn_ddp::Result<()> {
/// let sync = SyncGroup::new(&group);
/// let norm: SyncBatchNorm<B> = SyncBatchNormConfig::new(64).init(&device, Some(&sync))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct SyncGroup {
    group: Arc<dyn AnyGroup>,
    state: Arc<SyncState>,
    _alive: Arc<()>,
    _in_backward: Arc<()>,
    equal_weights: bool,
}

impl SyncGroup {
    /// Creates a handle to `group`, which lives as long as the handle and every layer made from it.
    pub fn new<G: Backend>(group: &ProcessGroup<G>) -> Self {
        let state = group.ranks().attached::<SyncState>();
        let _alive = state.alive.clone();
        let _in_backward = group.ranks().use_in_backward();
        Self { group: Arc::new(group.clone()), state, _alive, _in_backward, equal_weights: false }
    }

    /// Makes layers weigh every rank's loss equally, for micro-steps of unequal size without weights and for
    /// [`GradientReduction::Sum`](crate::GradientReduction::Sum). By default a rank's loss is weighed by its number of
    /// items, see [`SyncBatchNorm`](super::SyncBatchNorm).
    pub fn with_equal_weights(self) -> Self {
        Self { equal_weights: true, ..self }
    }

    /// This process's position in the group.
    pub fn rank(&self) -> Rank {
        self.group.rank()
    }

    /// Number of processes in the group.
    pub fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// While absent, this rank takes part in every collective of its layers, forward and backward, and contributes
    /// nothing. In a loop of your own, a rank without items in a global batch must do so, or the others wait for it:
    ///
    /// ```no_run
    /// # use burn::tensor::{Tensor, backend::AutodiffBackend};
    /// # use burn_ddp::{MicroStep, Replica, Result, nn::{SyncBatchNorm, SyncGroup}};
    /// # fn step<B: AutodiffBackend>(
    /// #     model: SyncBatchNorm<B>, replica: &mut Replica<B>, sync: SyncGroup, any_batch: Tensor<B, 2>,
    /// # ) -> Result<()> {
    /// sync.set_absent(true);
    /// let _ = model.forward(any_batch).mean().backward();
    /// sync.set_absent(false);
    /// let reduced = replica.reduce(&model, MicroStep::empty())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The setting applies to all handles to the group in this process. A backward pass uses the setting of its forward
    /// pass. At least one rank must not be absent. Layers that do not communicate, such as a plain `BatchNorm`, move
    /// their running states by the batch.
    pub fn set_absent(&self, absent: bool) {
        self.state.set_absent(absent);
    }

    /// True if this rank takes part without contributing; see [`SyncGroup::set_absent`]. Default false.
    pub fn is_absent(&self) -> bool {
        self.state.absent.load(Ordering::Relaxed)
    }

    /// Returns the element-wise sum of all ranks' `tensor` on every rank, as a differentiable operation; all ranks call
    /// it with the same shape.
    ///
    /// Its backward pass is the same operation: the gradient of `tensor` is the **sum** over ranks of the gradients of
    /// the result. If every rank computes a loss from the result, every rank's gradient is that of the sum of all
    /// losses. Divide by the world size for a mean over ranks, forward and backward. In a world of one, `tensor` is
    /// returned as it is.
    ///
    /// A forward pass cannot return an error. If the collective fails, or if the group cannot send tensors of `B`,
    /// `tensor` is returned unreduced and the group ends: every later call on any rank returns the first cause, and so
    /// does the next `Replica::reduce`.
    pub fn all_reduce_sum<B: Backend, const D: usize>(&self, tensor: Tensor<B, D>) -> Tensor<B, D> {
        if self.world_size() == 1 {
            return tensor;
        }
        let shape = tensor.dims();
        self.communicate(tensor.reshape([-1]), CollectiveKind::Sum, 1.0, false).0.reshape(shape)
    }

    /// Returns the tensors of all ranks, one after the other, and true. After an error the other ranks' tensors are
    /// zeros, and the flag is false. `items` is the weight of this rank's loss.
    pub(super) fn gather<B: Backend>(&self, tensor: Tensor<B, 1>, items: usize) -> (Tensor<B, 1>, bool) {
        let weight = if self.equal_weights { 1.0 } else { items as f64 };
        self.communicate(tensor, CollectiveKind::Gather, weight, items == 0)
    }

    fn communicate<B: Backend>(
        &self,
        mut tensor: Tensor<B, 1>,
        kind: CollectiveKind,
        weight: f64,
        empty: bool,
    ) -> (Tensor<B, 1>, bool) {
        let absent = empty || self.state.absent.load(Ordering::Relaxed);
        let complete = match self.group.communicate(&mut tensor, kind, weight, absent) {
            Some(complete) => complete,
            None => {
                self.group.fail(&self.foreign::<B>("all_reduce_sum"));
                false
            }
        };
        (tensor, complete)
    }

    /// Records that a layer has moved `state`, if this rank is absent.
    pub(super) fn record_moved<B: Backend>(&self, state: &RunningState<Tensor<B, 1>>) {
        struct Id<'a>(&'a mut Vec<ParamId>);
        impl<B: Backend> ModuleVisitor<B> for Id<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
                self.0.push(param.id);
            }
        }
        if self.is_absent() {
            state.visit(&mut Id(&mut self.state.moved.lock().unwrap_or_else(PoisonError::into_inner)));
        }
    }

    /// Checks that a layer of this group can be on backend `B`.
    ///
    /// # Errors
    /// If the group cannot send tensors of `B`; the error names both backends.
    pub(super) fn verify<B: Backend>(&self, layer: &str) -> Result<()> {
        if self.group.takes(TypeId::of::<B>()) { Ok(()) } else { Err(self.foreign::<B>(layer)) }
    }

    fn foreign<B: Backend>(&self, layer: &str) -> Error {
        let backend = self.group.backend();
        Error::config(format!(
            "{layer} on backend `{}` cannot use a group of `{backend}`: build the model on `Autodiff<{backend}>`, or \
             the group on the inner backend of the model's",
            type_name::<B>()
        ))
    }
}

impl fmt::Debug for SyncGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SyncGroup")
            .field("rank", &self.rank().0)
            .field("world_size", &self.world_size())
            .field("backend", &self.group.backend())
            .finish_non_exhaustive()
    }
}

/// A [`ProcessGroup`] of any backend.
trait AnyGroup: Send + Sync {
    fn rank(&self) -> Rank;
    fn world_size(&self) -> usize;
    fn backend(&self) -> &'static str;
    /// True if the group can send tensors of this backend.
    fn takes(&self, backend: TypeId) -> bool;
    /// Replaces a `Tensor<_, 1>` by the result of the collective, and returns true if the collective succeeded; `None`
    /// for a backend that it does not take.
    fn communicate(
        &self,
        tensor: &mut dyn Any,
        kind: CollectiveKind,
        weight: f64,
        absent: bool,
    ) -> Option<bool>;
    fn fail(&self, error: &Error);
}

impl<G: Backend> AnyGroup for ProcessGroup<G> {
    fn rank(&self) -> Rank {
        ProcessGroup::rank(self)
    }

    fn world_size(&self) -> usize {
        ProcessGroup::world_size(self)
    }

    fn backend(&self) -> &'static str {
        type_name::<G>()
    }

    fn takes(&self, backend: TypeId) -> bool {
        [
            TypeId::of::<G>(),
            TypeId::of::<Autodiff<G, NoCheckpointing>>(),
            TypeId::of::<Autodiff<G, BalancedCheckpointing>>(),
        ]
        .contains(&backend)
    }

    fn communicate(
        &self,
        tensor: &mut dyn Any,
        kind: CollectiveKind,
        weight: f64,
        absent: bool,
    ) -> Option<bool> {
        let collective = GraphCollective { group: self.clone(), kind, weight, absent };
        if let Some(tensor) = tensor.downcast_mut::<Tensor<G, 1>>() {
            return Some(replace(tensor, |tensor| collective.forward(tensor)));
        }
        if let Some(tensor) = tensor.downcast_mut::<Tensor<Autodiff<G, NoCheckpointing>, 1>>() {
            return Some(replace(tensor, |tensor| collective.tracked(tensor)));
        }
        let tensor = tensor.downcast_mut::<Tensor<Autodiff<G, BalancedCheckpointing>, 1>>()?;
        Some(replace(tensor, |tensor| collective.tracked(tensor)))
    }

    fn fail(&self, error: &Error) {
        ProcessGroup::fail(self, error);
    }
}

fn replace<T: Clone>(value: &mut T, change: impl FnOnce(T) -> (T, bool)) -> bool {
    let (new, complete) = change(value.clone());
    *value = new;
    complete
}
