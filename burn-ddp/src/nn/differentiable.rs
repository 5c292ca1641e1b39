//! Collectives as operations of Burn's autodiff.
//!
//! A value that has gone to all ranks has a gradient from all of them, so each operation has one collective in each
//! direction, for a tensor of length `n` in a world of `W` ranks:
//!
//! ```text
//!          forward                          backward
//! Sum      all_reduce      [n] -> [n]       all_reduce      [n] -> [n]
//! Gather   all_gather      [n] -> [W * n]   reduce_scatter  [W * n] -> [n]
//! ```
//!
//! The backward collective runs on the thread that calls `backward()`, under the graph's lock, so it only touches
//! tensors of the inner backend. Neither direction can return an error through Burn. A collective that fails ends the
//! group, and the operation returns this rank's tensor unchanged. The next call that can return an error,
//! `Replica::reduce`, returns the first cause, so no such gradient reaches an optimizer.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_ddp_comm::{ReduceOp, Result};

use crate::process_group::ProcessGroup;

/// Kind of a collective.
#[derive(Clone, Copy, Debug)]
pub(super) enum CollectiveKind {
    /// Sum of all ranks' tensors, on every rank.
    Sum,
    /// Tensors of all ranks one after the other, on every rank.
    Gather,
}

/// One collective, forward and backward.
#[derive(Clone)]
pub(super) struct GraphCollective<G: Backend> {
    pub(super) group: ProcessGroup<G>,
    pub(super) kind: CollectiveKind,
    /// Weight of this rank's loss in the loss of all ranks; only ratios between ranks matter.
    pub(super) weight: f64,
    /// True if this rank sends zeros.
    pub(super) absent: bool,
}

impl<G: Backend> std::fmt::Debug for GraphCollective<G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} over {} ranks, weight {}", self.kind, self.group.world_size(), self.weight)
    }
}

impl<G: Backend> GraphCollective<G> {
    /// Returns the result and true, or after an error this rank's tensor, with zeros for the others, and false.
    pub(super) fn forward(&self, mine: Tensor<G, 1>) -> (Tensor<G, 1>, bool) {
        let sent = if self.absent { mine.zeros_like() } else { mine.clone() };
        let work = match self.kind {
            CollectiveKind::Sum => self.group.all_reduce(sent, ReduceOp::Sum),
            CollectiveKind::Gather => self.group.all_gather(sent),
        };
        if let Some(result) = self.result_of(work.wait()) {
            return (result, true);
        }
        let alone = match self.kind {
            CollectiveKind::Sum => mine,
            CollectiveKind::Gather => {
                let length = mine.dims()[0];
                let all = Tensor::zeros([length * self.group.world_size()], (&mine.device(), mine.dtype()));
                all.slice_assign([self.own(length)], mine)
            }
        };
        (alone, false)
    }

    /// Does [`GraphCollective::forward`] and records it in the graph.
    pub(super) fn tracked<C: CheckpointStrategy>(
        self,
        tensor: Tensor<Autodiff<G, C>, 1>,
    ) -> (Tensor<Autodiff<G, C>, 1>, bool) {
        let tensor = tensor.into_primitive().tensor();
        let (output, complete) = self.forward(from_float(tensor.primitive));
        let output = output.into_primitive().tensor();
        // Compute bound, because a collective must not run again when a checkpoint is recomputed.
        let output = match CollectiveBackward.prepare::<C>([tensor.node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(self, output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        };
        (Tensor::from_primitive(TensorPrimitive::Float(output)), complete)
    }

    fn backward(&self, gradient: Tensor<G, 1>) -> Tensor<G, 1> {
        let sent = match (self.absent, self.weight == 1.0) {
            (true, _) => gradient.zeros_like(),
            (false, true) => gradient.clone(),
            (false, false) => gradient.clone() * self.weight,
        };
        let work = match self.kind {
            CollectiveKind::Sum => self.group.all_reduce(sent, ReduceOp::Sum),
            CollectiveKind::Gather => self.group.reduce_scatter(sent, ReduceOp::Sum),
        };
        match (self.result_of(work.wait()), self.kind) {
            (Some(sum), _) if self.absent => sum.zeros_like(),
            (Some(sum), _) if self.weight == 1.0 => sum,
            (Some(sum), _) => sum / self.weight,
            (None, CollectiveKind::Sum) => gradient,
            (None, CollectiveKind::Gather) => {
                let length = gradient.dims()[0] / self.group.world_size();
                gradient.slice([self.own(length)])
            }
        }
    }

    /// Returns the result of a collective, and ends the group by an error.
    fn result_of<T>(&self, result: Result<T>) -> Option<T> {
        result.inspect_err(|error| self.group.fail(error)).ok()
    }

    /// Range of this rank's tensor in the gathered tensor.
    fn own(&self, length: usize) -> std::ops::Range<usize> {
        let start = length * self.group.rank().0;
        start..start + length
    }
}

fn from_float<G: Backend>(tensor: FloatTensor<G>) -> Tensor<G, 1> {
    Tensor::from_primitive(TensorPrimitive::Float(tensor))
}

/// The operation that `backward()` finds in the graph.
#[derive(Debug)]
struct CollectiveBackward;

impl<G: Backend> Backward<G, 1> for CollectiveBackward {
    type State = GraphCollective<G>;

    fn backward(self, ops: Ops<GraphCollective<G>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let collective = ops.state;
        unary::<G, _>(ops.parents, ops.node, grads, |gradient| {
            collective.backward(from_float(gradient)).into_primitive().tensor()
        });
    }
}
