//! A process group as layers hold it: without a backend type.

use std::any::{Any, TypeId, type_name};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, NoCheckpointing};
use burn::module::{Module, ModuleVisitor, Param, ParamId, RunningState};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use super::differentiable::{Exchange, Kind};
use crate::error::{Error, Result};
use crate::process_group::ProcessGroup;
use crate::rank::Rank;

/// What the layers of a group and those who feed them must know of each other; kept with the group.
#[derive(Debug, Default)]
pub(crate) struct SyncState {
    /// Held by every handle, and so by every layer.
    alive: Arc<()>,
    absent: AtomicBool,
    /// Running states that layers moved while absent.
    moved: Mutex<Vec<ParamId>>,
}

impl SyncState {
    /// How many handles to the group there are, those of layers too. Above zero, forward passes may communicate,
    /// and a rank that has no items has to run one all the same, on any batch, with [`SyncState::set_absent`].
    pub(crate) fn modules(&self) -> usize {
        Arc::strong_count(&self.alive) - 1
    }

    /// See [`SyncGroup::set_absent`]. What an absent rank receives is everybody's, so its running states stay
    /// equal to theirs.
    pub(crate) fn set_absent(&self, absent: bool) {
        self.absent.store(absent, Ordering::Relaxed);
    }

    /// The running states that layers of the group have moved while this rank was absent, which are right. Others
    /// that have moved meanwhile were moved by a batch that is nobody's.
    pub(crate) fn take_moved(&self) -> Vec<ParamId> {
        std::mem::take(&mut *self.moved.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A handle to a process group for layers that communicate in their forward pass. Clones are handles to the
/// same group.
///
/// It has no backend type, so a model that is generic over its backend can hold it. Whether tensors of the
/// model's backend can be sent is checked when a layer is made of it: they are those of the group's own
/// backend, or of `Autodiff` of it with either of Burn's checkpointing strategies.
#[derive(Clone)]
pub struct SyncGroup {
    group: Arc<dyn AnyGroup>,
    state: Arc<SyncState>,
    _alive: Arc<()>,
    _in_backward: Arc<()>,
    equal_weights: bool,
}

impl SyncGroup {
    /// A handle to `group`. The group lives as long as the handle, and so as long as a model that has layers of
    /// it.
    pub fn new<G: Backend>(group: &ProcessGroup<G>) -> Self {
        let state = group.ranks().attached::<SyncState>();
        let _alive = state.alive.clone();
        let _in_backward = group.ranks().use_in_backward();
        Self { group: Arc::new(group.clone()), state, _alive, _in_backward, equal_weights: false }
    }

    /// For training in which every rank's loss counts the same whatever its number of items: micro-steps
    /// without weights but of unequal size, and [`GradientReduction::Sum`](crate::GradientReduction::Sum). By
    /// default layers take it that a rank's loss counts by its items, see
    /// [`SyncBatchNorm`](super::SyncBatchNorm).
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

    /// For loops of your own: while absent, this rank takes part in every collective of its layers, forward and
    /// backward, and contributes nothing to it. A rank without items in a global batch has to do that, or the
    /// others wait for it:
    ///
    /// ```no_run
    /// # use burn::tensor::{Tensor, backend::AutodiffBackend};
    /// # use burn_ddp::{MicroStep, Replica, Result, nn::{SyncBatchNorm, SyncGroup}};
    /// # fn step<B: AutodiffBackend>(model: SyncBatchNorm<B>, replica: &mut Replica<B>, sync: SyncGroup, any_batch: Tensor<B, 2>) -> Result<()> {
    /// sync.set_absent(true);
    /// let _ = model.forward(any_batch).mean().backward();
    /// sync.set_absent(false);
    /// let reduced = replica.reduce(&model, MicroStep::empty())?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Layers that do not communicate take the batch for one: a plain `BatchNorm` moves its running states by it.
    ///
    /// It concerns all handles to the group in this process. What counts for a backward pass is what was set
    /// during its forward pass. At least one rank must not be absent.
    pub fn set_absent(&self, absent: bool) {
        self.state.set_absent(absent);
    }

    /// Whether this rank takes part without contributing; see [`SyncGroup::set_absent`].
    pub fn is_absent(&self) -> bool {
        self.state.absent.load(Ordering::Relaxed)
    }

    /// The element-wise sum of all ranks' `tensor`, on every rank, as an operation that can be differentiated.
    ///
    /// Its backward pass is the same operation: the gradient of `tensor` is the **sum** over ranks of the
    /// gradients of the result. With `y` the sum and a loss of `y` on each rank, every rank's gradient is that
    /// of the sum of all losses, for two ranks twice that of one. A mean over ranks is this divided by the
    /// world size, forward and backward. In a world of one `tensor` is returned as it is.
    ///
    /// # Errors
    /// None that could be returned here, in a forward pass. After a failed collective, and when tensors of `B`
    /// cannot be sent by this group, `tensor` is returned unreduced and the group has ended: every later call,
    /// of all ranks, returns the first cause, and so does the next `Replica::reduce`.
    pub fn all_reduce_sum<B: Backend, const D: usize>(&self, tensor: Tensor<B, D>) -> Tensor<B, D> {
        if self.world_size() == 1 {
            return tensor;
        }
        let shape = tensor.dims();
        self.exchange(tensor.reshape([-1]), Kind::Sum, 1.0, false).0.reshape(shape)
    }

    /// The tensors of all ranks, one after the other. `items` is how much this rank's loss weighs. The flag is
    /// false when this failed and the other ranks' parts are zeros.
    pub(super) fn gather<B: Backend>(&self, tensor: Tensor<B, 1>, items: usize) -> (Tensor<B, 1>, bool) {
        let weight = if self.equal_weights { 1.0 } else { items as f64 };
        self.exchange(tensor, Kind::Gather, weight, items == 0)
    }

    fn exchange<B: Backend>(
        &self,
        mut tensor: Tensor<B, 1>,
        kind: Kind,
        weight: f64,
        empty: bool,
    ) -> (Tensor<B, 1>, bool) {
        let absent = empty || self.state.absent.load(Ordering::Relaxed);
        let complete = match self.group.exchange(&mut tensor, kind, weight, absent) {
            Some(complete) => complete,
            None => {
                self.group.fail(&self.foreign::<B>("all_reduce_sum"));
                false
            }
        };
        (tensor, complete)
    }

    /// Notes that a layer has moved this running state.
    pub(super) fn moved<B: Backend>(&self, state: &RunningState<Tensor<B, 1>>) {
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

    /// Whether a layer of this group can be on backend `B`.
    ///
    /// # Errors
    /// When tensors of `B` cannot be sent by this group, naming both.
    pub(super) fn verify<B: Backend>(&self, layer: &str) -> Result<()> {
        if self.group.takes(TypeId::of::<B>()) { Ok(()) } else { Err(self.foreign::<B>(layer)) }
    }

    fn foreign<B: Backend>(&self, layer: &str) -> Error {
        let backend = self.group.backend();
        Error::config(format!(
            "{layer} on backend `{}` cannot use a group of `{backend}`: build the model on `Autodiff<{backend}>`, or the \
             group on the inner backend of the model's",
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

/// A [`ProcessGroup`] whose backend is known to itself alone.
trait AnyGroup: Send + Sync {
    fn rank(&self) -> Rank;
    fn world_size(&self) -> usize;
    fn backend(&self) -> &'static str;
    /// Whether tensors of this backend can be sent.
    fn takes(&self, backend: TypeId) -> bool;
    /// Replaces a `Tensor<_, 1>` of a backend that it takes by what came of the collective, and says whether it
    /// did.
    fn exchange(&self, tensor: &mut dyn Any, kind: Kind, weight: f64, absent: bool) -> Option<bool>;
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

    fn exchange(&self, tensor: &mut dyn Any, kind: Kind, weight: f64, absent: bool) -> Option<bool> {
        let exchange = Exchange { group: self.clone(), kind, weight, absent };
        if let Some(tensor) = tensor.downcast_mut::<Tensor<G, 1>>() {
            return Some(replace(tensor, |tensor| exchange.forward(tensor)));
        }
        if let Some(tensor) = tensor.downcast_mut::<Tensor<Autodiff<G, NoCheckpointing>, 1>>() {
            return Some(replace(tensor, |tensor| exchange.tracked(tensor)));
        }
        let tensor = tensor.downcast_mut::<Tensor<Autodiff<G, BalancedCheckpointing>, 1>>()?;
        Some(replace(tensor, |tensor| exchange.tracked(tensor)))
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
