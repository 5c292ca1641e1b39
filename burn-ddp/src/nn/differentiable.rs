//! Collectives as operations of Burn's autodiff.
//!
//! The backward pass of a sum over ranks is a sum over ranks, that of a gather is a scattered sum: a value that
//! has gone to all ranks has a gradient from all of them. Each of the two directions is one collective of the
//! group, on the thread that calls `backward()`, which holds the graph's lock meanwhile; only tensors of the
//! inner backend are touched.
//!
//! Neither direction can return an error through Burn. A collective that fails has ended the group before it
//! returns, so the tensor is handed on as this rank had it, and the first cause comes out of the next call that
//! can return one, `Replica::reduce`, without which no gradient reaches an optimizer.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorPrimitive};

use crate::dtype::ReduceOp;
use crate::error::Result;
use crate::process_group::ProcessGroup;

/// Which collective.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// The sum of all ranks' tensors, on every rank.
    Sum,
    /// The tensors of all ranks one after the other, on every rank.
    Gather,
}

/// One collective, forward and backward.
#[derive(Clone)]
pub(super) struct Exchange<G: Backend> {
    pub(super) group: ProcessGroup<G>,
    pub(super) kind: Kind,
    /// By which this rank's loss is weighed in the loss of all ranks; only ratios between ranks matter.
    pub(super) weight: f64,
    /// Takes part, with zeros.
    pub(super) absent: bool,
}

impl<G: Backend> std::fmt::Debug for Exchange<G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} over {} ranks, weight {}", self.kind, self.group.world_size(), self.weight)
    }
}

impl<G: Backend> Exchange<G> {
    /// The result and whether it is one: after an error this rank's tensor stands for all.
    pub(super) fn forward(&self, mine: Tensor<G, 1>) -> (Tensor<G, 1>, bool) {
        let sent = if self.absent { mine.zeros_like() } else { mine.clone() };
        let work = match self.kind {
            Kind::Sum => self.group.all_reduce(sent, ReduceOp::Sum),
            Kind::Gather => self.group.all_gather(sent),
        };
        if let Some(result) = self.ended(work.wait()) {
            return (result, true);
        }
        let alone = match self.kind {
            Kind::Sum => mine,
            Kind::Gather => {
                let length = mine.dims()[0];
                let all = Tensor::zeros([length * self.group.world_size()], (&mine.device(), mine.dtype()));
                all.slice_assign([self.own(length)], mine)
            }
        };
        (alone, false)
    }

    /// [`Exchange::forward`] recorded in the graph.
    pub(super) fn tracked<C: CheckpointStrategy>(
        self,
        tensor: Tensor<Autodiff<G, C>, 1>,
    ) -> (Tensor<Autodiff<G, C>, 1>, bool) {
        let tensor = tensor.into_primitive().tensor();
        let (output, complete) = self.forward(from_float(tensor.primitive));
        let output = output.into_primitive().tensor();
        // Compute bound: a collective must not run again when a checkpoint is recomputed.
        let output = match Collective.prepare::<C>([tensor.node]).compute_bound().stateful() {
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
            Kind::Sum => self.group.all_reduce(sent, ReduceOp::Sum),
            Kind::Gather => self.group.reduce_scatter(sent, ReduceOp::Sum),
        };
        match (self.ended(work.wait()), self.kind) {
            (Some(sum), _) if self.absent => sum.zeros_like(),
            (Some(sum), _) if self.weight == 1.0 => sum,
            (Some(sum), _) => sum / self.weight,
            (None, Kind::Sum) => gradient,
            (None, Kind::Gather) => {
                let length = gradient.dims()[0] / self.group.world_size();
                gradient.slice([self.own(length)])
            }
        }
    }

    /// What came of a collective; an error ends the group, wherever it was found.
    fn ended<T>(&self, result: Result<T>) -> Option<T> {
        result.inspect_err(|error| self.group.fail(error)).ok()
    }

    /// Where this rank's part is in what was gathered.
    fn own(&self, length: usize) -> std::ops::Range<usize> {
        let start = length * self.group.rank().0;
        start..start + length
    }
}

fn from_float<G: Backend>(tensor: FloatTensor<G>) -> Tensor<G, 1> {
    Tensor::from_primitive(TensorPrimitive::Float(tensor))
}

/// The step that `backward()` finds in the graph.
#[derive(Debug)]
struct Collective;

impl<G: Backend> Backward<G, 1> for Collective {
    type State = Exchange<G>;

    fn backward(self, ops: Ops<Exchange<G>, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let exchange = ops.state;
        unary::<G, _>(ops.parents, ops.node, grads, |gradient| {
            exchange.backward(from_float(gradient)).into_primitive().tensor()
        });
    }
}
