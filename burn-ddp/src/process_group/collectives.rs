//! The collectives of a group: tensors are staged here, queued for the communication thread, and made again when
//! the work is waited for.

use std::sync::PoisonError;

use burn::tensor::{Tensor, backend::Backend};
use burn_backend::Bytes;

use super::{GroupKind, ProcessGroup, Work};
use crate::communicator::{AnyTensor, Communicator, Layout, Memory, Operation, Segment, Staged};
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;

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

    /// [`ProcessGroup::reduce_gradients`] while a backward pass runs, by whoever has the `turn`.
    pub(crate) fn reduce_gradients_in_backward(
        &self,
        tensors: Vec<AnyTensor<B>>,
        op: ReduceOp,
        lease: &super::BackwardLease,
    ) -> Work<Vec<AnyTensor<B>>> {
        self.0.counters.in_backward();
        lease.send(|| self.reduce_gradients(tensors, op))
    }

    /// [`ProcessGroup::broadcast`] of several tensors of one dtype as one collective.
    pub fn broadcast_list(&self, tensors: Vec<AnyTensor<B>>, root: Rank) -> Work<Vec<AnyTensor<B>>> {
        self.list(Operation::Broadcast(root), tensors)
    }

    /// The bytes of all ranks, in rank order, on every rank; lengths may differ.
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.bytes(Operation::AllGatherBytes, bytes).wait()
    }

    /// The bytes of all ranks, in rank order, on rank `root`, and nothing on the others; lengths may differ.
    pub fn gather_bytes(&self, bytes: Vec<u8>, root: Rank) -> Work<Vec<Vec<u8>>> {
        self.bytes(Operation::GatherBytes(root), bytes)
    }

    /// The bytes of rank `root` on every rank; other ranks' are not looked at.
    pub fn broadcast_bytes(&self, bytes: &[u8], root: Rank) -> Result<Vec<u8>> {
        let mine = if self.rank() == root { bytes.to_vec() } else { Vec::new() };
        let mut all = self.all_gather_bytes(mine)?;
        if root.0 >= all.len() {
            let message = format!("broadcast from {root}: the group has {} ranks", all.len());
            return Err(Error::config(message));
        }
        Ok(all.swap_remove(root.0))
    }

    fn bytes(&self, operation: Operation, bytes: Vec<u8>) -> Work<Vec<Vec<u8>>> {
        let segment = Segment { dtype: DType::U8, memory: Memory::Host(Bytes::from_bytes_vec(bytes)) };
        self.submit(operation, Ok(vec![segment]), |staged| {
            staged.into_iter().map(|segment| Ok(host_bytes(segment)?.to_vec())).collect()
        })
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<()> {
        self.submit(Operation::Barrier, Ok(Vec::new()), |_| Ok(())).wait()
    }

    fn one<const D: usize, K: GroupKind<B>>(
        &self,
        operation: Operation,
        tensor: Tensor<B, D, K>,
        shape: impl FnOnce(Vec<usize>, usize) -> Vec<usize> + Send + 'static,
    ) -> Work<Tensor<B, D, K>> {
        let tensor = K::into_any(tensor.into_primitive());
        let Some(connected) = &self.0.connected else {
            self.0.counters.count(operation.kind(), 0);
            let result = self.permitted(operation, &tensor).and_then(|()| K::from_any(tensor));
            return Work::ready(result.map(Tensor::from_primitive));
        };
        let mut layout = Layout::of(&tensor);
        let permitted = self.permitted(operation, &tensor);
        let staged = permitted.and_then(|()| connected.communicator.stage(operation, vec![tensor]));
        let group = self.clone();
        self.submit(operation, staged, move |staged| {
            let count = staged.iter().map(|segment| segment.memory.bytes() / segment.dtype.size()).sum();
            layout.shape = shape(layout.shape, count);
            let [tensor] = exactly(group.communicator()?.unstage(staged, &[layout])?)?;
            K::from_any(tensor)
        })
        .map(Tensor::from_primitive)
    }

    fn list(&self, operation: Operation, tensors: Vec<AnyTensor<B>>) -> Work<Vec<AnyTensor<B>>> {
        let Some(connected) = &self.0.connected else {
            self.0.counters.count(operation.kind(), 0);
            return Work::ready(Ok(tensors));
        };
        let layouts: Vec<_> = tensors.iter().map(Layout::of).collect();
        let permitted = tensors.iter().try_for_each(|tensor| self.permitted(operation, tensor));
        let staged = permitted.and_then(|()| connected.communicator.stage(operation, tensors));
        let group = self.clone();
        self.submit(operation, staged, move |staged| group.communicator()?.unstage(staged, &layouts))
    }

    fn communicator(&self) -> Result<&dyn Communicator<B>> {
        match &self.0.connected {
            Some(connected) => Ok(connected.communicator.as_ref()),
            None => Err(Error::new(ErrorKind::Aborted, "a world of one has no communicator")),
        }
    }

    fn permitted(&self, operation: Operation, tensor: &AnyTensor<B>) -> Result<()> {
        match (operation, tensor) {
            (
                Operation::AllReduce(_) | Operation::ReduceGradients(_) | Operation::ReduceScatter(_),
                AnyTensor::Bool(_),
            ) => Err(Error::config("boolean tensors cannot be reduced: call .int() first")),
            (Operation::Broadcast(root), _) if root.0 >= self.world_size() => Err(Error::config(format!(
                "broadcast from {root}: the group has {} ranks",
                self.world_size()
            ))),
            _ => Ok(()),
        }
    }

    /// Hands staged memory to the communication thread. A rank that cannot take part (`staged` is an error) is
    /// out of step with its peers, so that ends the group.
    fn submit<T>(
        &self,
        operation: Operation,
        staged: Result<Staged>,
        finish: impl FnOnce(Staged) -> Result<T> + Send + 'static,
    ) -> Work<T> {
        let staged = staged.and_then(|staged| self.0.turns.check(operation).map(|()| staged));
        let staged = match staged {
            Ok(staged) => staged,
            Err(error) => {
                self.fail(&error);
                return Work::ready(Err(error));
            }
        };
        let bytes = staged.iter().map(|segment| segment.memory.bytes()).sum();
        self.0.counters.count(operation.kind(), bytes);
        match &self.0.connected {
            None => Work::ready(finish(staged)),
            Some(connected) => {
                let thread = connected.thread.lock().unwrap_or_else(PoisonError::into_inner);
                Work::pending(thread.submit(operation, staged), finish, self.0.counters.clone())
            }
        }
    }
}

fn exactly<B: Backend>(tensors: Vec<AnyTensor<B>>) -> Result<[AnyTensor<B>; 1]> {
    tensors.try_into().map_err(|tensors: Vec<_>| {
        Error::new(ErrorKind::Mismatch, format!("a collective of one tensor returned {}", tensors.len()))
    })
}

fn host_bytes(segment: Segment) -> Result<Bytes> {
    match segment.memory {
        Memory::Host(bytes) => Ok(bytes),
        Memory::Device(memory) => Err(Error::config(format!("expected host bytes, got {memory:?}"))),
    }
}
