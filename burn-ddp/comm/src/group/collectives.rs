//! The collectives of a group: memory is queued for the communication thread and handed back when the work is waited
//! for.

use std::any::Any;
use std::sync::PoisonError;

use serde::{Serialize, de::DeserializeOwned};

use super::memory::{Memory, Number, Segment, Staged};
use super::{Group, Work};
use crate::dtype::ReduceOp;
use crate::error::{Error, ErrorKind, Result};
use crate::net::codec;
use crate::operation::Operation;
use crate::rank::Rank;

impl Group {
    /// Starts `operation` on `staged`. `finish` turns the returned memory into the result, on the thread that
    /// waits. In a world of one it gets `staged` as it is.
    ///
    /// A rank that cannot take part (`staged` is an error) is out of step with its peers, which ends the group.
    pub fn submit<T>(
        &self,
        operation: Operation,
        staged: Result<Staged>,
        finish: impl FnOnce(Staged) -> Result<T> + Send + 'static,
    ) -> Work<T> {
        let staged = staged.and_then(|staged| {
            self.check_root(operation)?;
            self.0.lease.check(operation)?;
            Ok(staged)
        });
        let staged = match staged {
            Ok(staged) => staged,
            Err(error) => {
                self.fail(&error);
                return Work::ready(Err(error));
            }
        };
        let bytes = staged.iter().map(|segment| segment.memory.bytes()).sum();
        self.0.counters.count(operation, bytes);
        match &self.0.connected {
            None => Work::ready(finish(staged)),
            Some(connected) => {
                let thread = connected.thread.lock().unwrap_or_else(PoisonError::into_inner);
                Work::pending(thread.submit(operation, staged), finish, self.0.counters.clone())
            }
        }
    }

    /// The element-wise reduction of all ranks' `data`, on every rank. Lengths must be equal.
    pub fn all_reduce<T: Number>(&self, data: Vec<T>, op: ReduceOp) -> Work<Vec<T>> {
        self.submit(Operation::AllReduce(op), Ok(staged(data)), only)
    }

    /// The data of rank `root`, on every rank. Lengths must be equal.
    pub fn broadcast<T: Number>(&self, data: Vec<T>, root: Rank) -> Work<Vec<T>> {
        self.submit(Operation::Broadcast(root), Ok(staged(data)), only)
    }

    /// The bytes of all ranks, in rank order, on every rank; lengths may differ.
    ///
    /// # Errors
    /// The first error of the group.
    pub fn all_gather_bytes(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.submit(Operation::AllGatherBytes, Ok(staged(bytes)), all_bytes).wait()
    }

    /// The values of all ranks, in rank order, on every rank; `what` names them in errors.
    ///
    /// # Errors
    /// The first error of the group; `Mismatch` for a value of another form.
    pub fn exchange<T: Serialize + DeserializeOwned>(&self, what: &str, mine: &T) -> Result<Vec<T>> {
        let all = self.all_gather_bytes(codec::encode(what, mine)?)?;
        all.iter().map(|bytes| codec::decode(what, bytes)).collect()
    }

    /// The bytes of all ranks, in rank order, on rank `root`, and nothing on the others; lengths may differ.
    pub fn gather_bytes(&self, bytes: Vec<u8>, root: Rank) -> Work<Vec<Vec<u8>>> {
        self.submit(Operation::GatherBytes(root), Ok(staged(bytes)), all_bytes)
    }

    /// The bytes of rank `root` on every rank; those of other ranks are ignored.
    ///
    /// # Errors
    /// `Config` for a root outside the group; else the first error of the group.
    pub fn broadcast_bytes(&self, bytes: &[u8], root: Rank) -> Result<Vec<u8>> {
        let mine = if self.rank() == root { bytes.to_vec() } else { Vec::new() };
        let mut all = self.all_gather_bytes(mine)?;
        self.check_root(Operation::Broadcast(root))?;
        Ok(all.swap_remove(root.0))
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// The first error of the group.
    pub fn barrier(&self) -> Result<()> {
        self.submit(Operation::Barrier, Ok(Vec::new()), |_| Ok(())).wait()
    }

    fn check_root(&self, operation: Operation) -> Result<()> {
        match operation.root().filter(|root| root.0 >= self.world_size()) {
            None => Ok(()),
            Some(root) => Err(Error::config(format!(
                "{operation} with root {root}: the group has {} ranks",
                self.world_size()
            ))),
        }
    }
}

fn staged<T: Number>(data: Vec<T>) -> Staged {
    vec![Segment { dtype: T::DTYPE, memory: Memory::Host(Box::new(data)) }]
}

/// The `Vec` of the single segment, which was changed in place.
fn only<T: Number>(mut staged: Staged) -> Result<Vec<T>> {
    match (staged.pop(), staged.len()) {
        (Some(segment), 0) => into_vec(segment),
        (_, others) => {
            Err(Error::new(ErrorKind::Mismatch, format!("a collective of one buffer returned {others} more")))
        }
    }
}

fn all_bytes(staged: Staged) -> Result<Vec<Vec<u8>>> {
    staged.into_iter().map(into_vec).collect()
}

fn into_vec<T: Number>(segment: Segment) -> Result<Vec<T>> {
    let memory: Box<dyn Any> = match segment.memory {
        Memory::Host(memory) => memory,
        Memory::Device(memory) => {
            return Err(Error::config(format!("expected memory of the host, got {memory:?}")));
        }
    };
    let foreign = |_| Error::new(ErrorKind::Mismatch, format!("expected a `Vec` of {}", T::DTYPE));
    memory.downcast::<Vec<T>>().map(|data| *data).map_err(foreign)
}
