//! What `shm/mod.rs` is on systems without its means (anonymous files, abstract sockets, futexes): no rank finds another to
//! share memory with, and all of them talk over TCP. The types have no values, so nothing here is ever run.

use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;

use serde::{Deserialize, Serialize};

use super::Liveness;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::rank::Rank;

fn absent<T>() -> Result<T> {
    Err(Error::config("shared memory between processes is there on Linux only"))
}

/// Whether the caller of a group's collectives computes while they run; matters to shared memory only.
#[derive(Clone, Debug, Default)]
pub struct CallerBusy(());

impl CallerBusy {
    /// Says so.
    pub fn set(&self, _busy: bool) {}
}

/// The ranks that share a board.
#[derive(Clone, Debug)]
#[allow(dead_code, reason = "a board that is never made")]
pub(crate) struct BoardPlan {
    /// In ascending order.
    pub members: Vec<Rank>,
    /// Cores on which at least one of them may run.
    pub cores: usize,
}

impl BoardPlan {
    /// Bytes of the whole board.
    pub fn bytes(&self) -> usize {
        0
    }
}

/// What a rank of another system tells its peers of its door: ranks of both may be in one group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Offer {
    name: String,
    nonce: [u8; 16],
}

/// A way to this rank's memory: there is none.
pub(crate) struct Door(Infallible);

/// A connection to a [`Door`].
pub(crate) struct Visit(Infallible);

/// Memory that ranks share.
pub(crate) struct Board(Infallible);

/// A turn on a [`Board`].
pub(crate) struct Turn<'a>(Infallible, PhantomData<&'a mut Board>);

/// The places on a [`Board`].
#[derive(Clone, Copy)]
pub(crate) struct Places<'a>(Infallible, PhantomData<&'a [u8]>);

/// Connects to a door.
pub(crate) fn knock(_offer: &Offer) -> Result<Visit> {
    absent()
}

#[allow(missing_docs, clippy::missing_errors_doc, reason = "documented where they do something")]
impl Door {
    pub fn open(_visitors: usize) -> Result<Self> {
        absent()
    }

    pub fn offer(&self) -> &Offer {
        match self.0 {}
    }

    pub fn host(self, _: BoardPlan, _: Liveness, _: CallerBusy, _: Deadline) -> Result<Board> {
        match self.0 {}
    }
}

#[allow(missing_docs, clippy::missing_errors_doc, reason = "documented where they do something")]
impl Visit {
    pub fn join(self, _: BoardPlan, _: usize, _: Liveness, _: CallerBusy, _: Deadline) -> Result<Board> {
        match self.0 {}
    }
}

#[allow(missing_docs, clippy::missing_errors_doc, reason = "documented where they do something")]
impl Board {
    pub fn members(&self) -> &[Rank] {
        match self.0 {}
    }

    pub fn position(&self) -> usize {
        match self.0 {}
    }

    pub fn place_bytes(&self) -> usize {
        match self.0 {}
    }

    pub fn turn(&mut self, _: &impl fmt::Display, _: Deadline) -> Result<Turn<'_>> {
        match self.0 {}
    }

    pub fn fail(&self, _: Error) -> Error {
        match self.0 {}
    }
}

#[allow(missing_docs, reason = "documented where they do something")]
impl Turn<'_> {
    pub fn places(&mut self) -> (Places<'_>, &mut [u8]) {
        match self.0 {}
    }

    pub fn mine(&mut self) -> &mut [u8] {
        match self.0 {}
    }

    pub fn publish(self) {
        match self.0 {}
    }
}

#[allow(missing_docs, reason = "documented where they do something")]
impl<'a> Places<'a> {
    pub fn of(&self, _: usize) -> &'a [u8] {
        match self.0 {}
    }
}
