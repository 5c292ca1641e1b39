//! The collectives of a group: tensors are staged here, queued for the communication thread, and made again when
//! the work is waited for.

use burn::tensor::{Tensor, backend::Backend};
use burn_ddp_comm::{Error, ErrorKind, Rank, ReduceOp, Result};

use super::{BackwardLease, GroupKind, ProcessGroup, Work};
use crate::communicator::{AnyTensor, Communicator, Layout, Operation, Staged};

impl<B: Backend> ProcessGroup<B> {
    /// The element-wise reduction of all ranks' `tensor`, on every rank. Shapes must be equal.
    pub fn all_reduce<const D: usize, K: GroupKind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        op: ReduceOp,
    ) -> Work<Tensor<B, D, K>> {
        self.one(Operation::AllReduce(op), tensor, |shape, _| shape)
    }

    /// The tensor of rank `root` on every rank. Shapes must be equal.
    pub fn broadcast<const D: usize, K: GroupKind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        root: Rank,
    ) -> Work<Tensor<B, D, K>> {
        self.one(Operation::Broadcast(root), tensor, |shape, _| shape)
    }

    /// The tensors of all ranks, joined along the first dimension in rank order. Shapes must be equal.
    pub fn all_gather<const D: usize, K: GroupKind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
    ) -> Work<Tensor<B, D, K>> {
        let world_size = self.world_size();
        self.one(Operation::AllGather, tensor, move |mut shape, _| {
            if let Some(first) = shape.first_mut() {
                *first *= world_size;
            }
            shape
        })
    }

    /// This rank's chunk of the element-wise reduction. Elements are split as evenly as it goes, the first
    /// ranks having one more where the length does not divide.
    pub fn reduce_scatter<K: GroupKind<B>>(
        &self,
        tensor: Tensor<B, 1, K>,
        op: ReduceOp,
    ) -> Work<Tensor<B, 1, K>> {
        self.one(Operation::ReduceScatter(op), tensor, |_, count| vec![count])
    }

    /// [`ProcessGroup::all_reduce`] of several tensors of one dtype as one collective.
    pub fn all_reduce_list(&self, tensors: Vec<AnyTensor<B>>, op: ReduceOp) -> Work<Vec<AnyTensor<B>>> {
        self.list(Operation::AllReduce(op), tensors)
    }

    /// [`ProcessGroup::all_reduce_list`] of a gradient bucket.
    pub(crate) fn reduce_gradients(
        &self,
        tensors: Vec<AnyTensor<B>>,
        op: ReduceOp,
    ) -> Work<Vec<AnyTensor<B>>> {
        self.list(Operation::ReduceGradients(op), tensors)
    }

    /// [`ProcessGroup::reduce_gradients`] while a backward pass runs, by the holder of `lease`.
    pub(crate) fn reduce_gradients_in_backward(
        &self,
        tensors: Vec<AnyTensor<B>>,
        op: ReduceOp,
        lease: &BackwardLease,
    ) -> Work<Vec<AnyTensor<B>>> {
        self.0.group.count_in_backward();
        lease.while_sending(|| self.reduce_gradients(tensors, op))
    }

    /// [`ProcessGroup::broadcast`] of several tensors of one dtype as one collective.
    pub fn broadcast_list(&self, tensors: Vec<AnyTensor<B>>, root: Rank) -> Work<Vec<AnyTensor<B>>> {
        self.list(Operation::Broadcast(root), tensors)
    }

    /// The bytes of all ranks, in rank order, on every rank; lengths may differ.
    ///
    /// # Errors
    /// The first error of the group.
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.0.group.all_gather_bytes(bytes)
    }

    /// The bytes of all ranks, in rank order, on rank `root`, and nothing on the others; lengths may differ.
    pub fn gather_bytes(&self, bytes: Vec<u8>, root: Rank) -> Work<Vec<Vec<u8>>> {
        self.0.group.gather_bytes(bytes, root)
    }

    /// The bytes of rank `root` on every rank; those of other ranks are ignored.
    ///
    /// # Errors
    /// `Config` for a root outside the group; else the first error of the group.
    pub fn broadcast_bytes(&self, bytes: &[u8], root: Rank) -> Result<Vec<u8>> {
        self.0.group.broadcast_bytes(bytes, root)
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// The first error of the group.
    pub fn barrier(&self) -> Result<()> {
        self.0.group.barrier()
    }

    /// Starts a collective of one tensor; `shape` makes the result's shape of the tensor's and the number of elements.
    fn one<const D: usize, K: GroupKind<B>>(
        &self,
        operation: Operation,
        tensor: Tensor<B, D, K>,
        shape: impl FnOnce(Vec<usize>, usize) -> Vec<usize> + Send + 'static,
    ) -> Work<Tensor<B, D, K>> {
        let tensor = K::into_any(tensor.into_primitive());
        let permitted = permitted(operation, &tensor);
        let Some(communicator) = &self.0.communicator else {
            let unchanged = move |_| K::from_any(tensor).map(Tensor::from_primitive);
            return self.0.group.submit(operation, permitted.map(|()| Vec::new()), unchanged);
        };
        let mut layout = Layout::of(&tensor);
        let staged = permitted.and_then(|()| communicator.stage(operation, vec![tensor]));
        let group = self.clone();
        let finish = move |staged: Staged| {
            let count = staged.iter().map(|segment| segment.memory.bytes() / segment.dtype.size()).sum();
            layout.shape = shape(layout.shape, count);
            let [tensor] = exactly(group.communicator()?.unstage(staged, &[layout])?)?;
            Ok(Tensor::from_primitive(K::from_any(tensor)?))
        };
        self.0.group.submit(operation, staged, finish)
    }

    fn list(&self, operation: Operation, tensors: Vec<AnyTensor<B>>) -> Work<Vec<AnyTensor<B>>> {
        let permitted = tensors.iter().try_for_each(|tensor| permitted(operation, tensor));
        let Some(communicator) = &self.0.communicator else {
            return self.0.group.submit(operation, permitted.map(|()| Vec::new()), |_| Ok(tensors));
        };
        let layouts: Vec<_> = tensors.iter().map(Layout::of).collect();
        let staged = permitted.and_then(|()| communicator.stage(operation, tensors));
        let group = self.clone();
        self.0.group.submit(operation, staged, move |staged| group.communicator()?.unstage(staged, &layouts))
    }

    fn communicator(&self) -> Result<&dyn Communicator<B>> {
        match &self.0.communicator {
            Some(communicator) => Ok(communicator.as_ref()),
            None => Err(Error::new(ErrorKind::Aborted, "a world of one has no communicator")),
        }
    }
}

/// Refuses reductions of boolean tensors.
fn permitted<B: Backend>(operation: Operation, tensor: &AnyTensor<B>) -> Result<()> {
    match tensor {
        AnyTensor::Bool(_) if operation.reduction().is_some() => {
            Err(Error::config("boolean tensors cannot be reduced: call .int() first"))
        }
        _ => Ok(()),
    }
}

fn exactly<B: Backend>(tensors: Vec<AnyTensor<B>>) -> Result<[AnyTensor<B>; 1]> {
    tensors.try_into().map_err(|tensors: Vec<_>| {
        Error::new(ErrorKind::Mismatch, format!("a collective of one tensor returned {}", tensors.len()))
    })
}
