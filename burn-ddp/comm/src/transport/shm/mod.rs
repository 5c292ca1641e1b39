//! Memory that the ranks of one host share, and turns in which they use it.
//!
//! It is no [`Transport`](super::Transport), because frames would cost what shared memory saves: a sum can be taken
//! straight out of what the others have written, and a result that is written once can be read by all. So this seam is
//! lower and smaller than a wire: a `Board` on which every rank has a place of its own. All ranks take the same
//! turns: write on one's own place, publish, wait until all have published, read the places of the others. Which bytes
//! that are is the collectives' business.
//!
//! A rank has several places and uses them in turn, which is all the flow control there is. Whoever writes for step s + 1
//! overwrites what it wrote for step s - 3 (with two places it would be s - 1), and has seen everybody publish step s; and
//! nobody publishes step s before it has read step s - 1 and all before it. A `Turn` borrows the board, so the compiler keeps each rank to its half of that.
//!
//! The ranks of a host find each other by an abstract Unix socket (`meet.rs`), over which the memory is handed out:
//! whoever can connect to it runs on the same kernel and in the same network namespace.
//! The socket is closed afterwards. That a peer has died is told by the control channel's connection, which the kernel
//! closes with the process, and a rank that waits here looks at [`Liveness`] at least every `NAP`.
#![allow(unsafe_code)]

mod handoff;
mod meet;
mod memory;
mod patience;

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::time::Duration;

pub(crate) use meet::{Door, Offer, Visit, knock};
pub use patience::CallerBusy;

use handoff::Line;
use memory::SharedMemory;
use patience::Patience;

use super::{Liveness, PeerState};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;

/// Longest sleep before a waiting rank looks whether the group still stands.
const NAP: Duration = Duration::from_millis(20);
/// Places begin at pages.
const PAGE: usize = 4096;
/// Places of a rank. Two would do; but memory that a peer has just read is still in its cache, and writing it then takes
/// three times as long as writing what has been pushed out of there meanwhile (1 MiB between two ranks: 118 us with two
/// places, 66 with four, 58 with eight).
const PLACES: usize = 4;

/// The ranks that share a board and how it is laid out; equal on all of them.
#[derive(Clone, Debug)]
pub(crate) struct BoardPlan {
    /// In ascending order.
    pub members: Vec<Rank>,
    /// Cores on which at least one of them may run.
    pub cores: usize,
}

impl BoardPlan {
    /// Bytes of one place. A few hundred KiB, so that what is written is still in the second-level cache of its writer
    /// when the others read it; less for many ranks, so that a host's board stays at a few MiB.
    fn place(&self) -> usize {
        const MOST: usize = 256 << 10;
        let share = (8 << 20) / (PLACES * self.members.len().max(1));
        // A cache line for each member at least, and a page more for what stands in front of the data.
        let least = (self.members.len() * size_of::<Line>()).next_multiple_of(PAGE);
        (MOST.min(share) / PAGE * PAGE).max(least) + PAGE
    }

    fn lines(&self) -> usize {
        (self.members.len() * size_of::<Line>()).next_multiple_of(PAGE)
    }

    /// Bytes of the whole board.
    pub fn bytes(&self) -> usize {
        self.lines() + PLACES * self.members.len() * self.place()
    }
}

/// One rank's view of the memory that it shares with others. See the [module documentation](self).
pub(crate) struct Board {
    plan: BoardPlan,
    place: usize,
    me: usize,
    /// Steps that this rank has published.
    step: u32,
    /// Whether all others are known to have published that step.
    settled: bool,
    liveness: Liveness,
    patience: Patience,
    start: NonNull<u8>,
    _memory: Box<dyn Any + Send>,
}

// SAFETY: the pointer is into `_memory`, which may be moved between threads; turns need the board exclusively.
unsafe impl Send for Board {}

impl Board {
    /// The board of `plan` on `memory`, which is zeroed when the first of its members comes, for the rank at `me` among
    /// the members.
    fn new(plan: BoardPlan, me: usize, memory: SharedMemory, liveness: Liveness, caller: CallerBusy) -> Self {
        let start = memory.start();
        // SAFETY: `meet` reserves and maps `plan.bytes()` zeroed bytes for members of this protocol.
        unsafe { Self::over(plan, me, start, Box::new(memory), liveness, caller) }
    }

    /// # Safety
    /// `start` must be the beginning of `plan.bytes()` bytes, aligned to a page, zeroed before the first board is made,
    /// alive as long as `memory`, and used by nobody but one board for each member.
    unsafe fn over(
        plan: BoardPlan,
        me: usize,
        start: NonNull<u8>,
        memory: Box<dyn Any + Send>,
        liveness: Liveness,
        caller: CallerBusy,
    ) -> Self {
        assert!(me < plan.members.len(), "member {me} of {}", plan.members.len());
        let patience = Patience::new(plan.cores, plan.members.len(), caller);
        let place = plan.place();
        Self { plan, place, me, step: 0, settled: true, liveness, patience, start, _memory: memory }
    }

    /// The ranks that share it, in ascending order.
    pub fn members(&self) -> &[Rank] {
        &self.plan.members
    }

    /// This rank's position among the members.
    pub fn position(&self) -> usize {
        self.me
    }

    /// Bytes of a place.
    pub fn place_bytes(&self) -> usize {
        self.place
    }

    /// Waits until all members have published as many steps as this rank, which then may read them and write the next.
    ///
    /// # Errors
    /// `Timeout` naming the first rank that is missing, `PeerLost` and other causes for which the group has ended;
    /// `operation` says in which operation. The group ends with any of them.
    pub fn turn(&mut self, operation: &impl fmt::Display, deadline: Deadline) -> Result<Turn<'_>> {
        if !self.settled {
            for member in 0..self.plan.members.len() {
                if member != self.me && !self.line(member).has_reached(self.step) {
                    self.wait(member, deadline).map_err(|error| {
                        self.fail(
                            error.context(format_args!("{} in {operation}", self.plan.members[self.me])),
                        )
                    })?;
                }
            }
            self.settled = true;
        }
        Ok(Turn { board: self })
    }

    /// Ends the group because of `error`; returns why it has ended, if there was an earlier cause.
    pub fn fail(&self, error: Error) -> Error {
        self.liveness.fail(error.clone());
        self.liveness.cause().unwrap_or(error)
    }

    fn wait(&self, member: usize, deadline: Deadline) -> Result<()> {
        let (line, peer) = (self.line(member), self.plan.members[member]);
        if self.patience.until(|| line.has_reached(self.step)) {
            return Ok(());
        }
        loop {
            let cause = self.liveness.check();
            let left = matches!(self.liveness.peer(peer), PeerState::Finished);
            // In this order: who has left, or ended the group, has published before that what it could.
            if line.has_reached(self.step) {
                return Ok(());
            }
            cause?;
            if left {
                return Err(self.liveness.closed_by(peer, deadline));
            }
            if deadline.passed() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "waited {:?} for {peer}, which shares this host's memory; nobody is known to be dead, so it is \
                         slow or never calls this operation",
                        deadline.limit()
                    ),
                ));
            }
            line.sleep(self.step, NAP.min(deadline.remaining()));
        }
    }

    fn line(&self, member: usize) -> &Line {
        assert!(member < self.plan.members.len(), "member {member} of {}", self.plan.members.len());
        // SAFETY: lines stand at the beginning, one for each member, aligned and zeroed, and are only used by reference.
        unsafe { self.start.cast::<Line>().add(member).as_ref() }
    }

    /// Where `member` writes for `step`.
    fn place(&self, member: usize, step: u32) -> NonNull<u8> {
        assert!(member < self.plan.members.len(), "member {member} of {}", self.plan.members.len());
        let offset = self.plan.lines() + (PLACES * member + step as usize % PLACES) * self.place;
        // SAFETY: `BoardPlan::bytes` counts `PLACES` places for each member behind the lines.
        unsafe { self.start.add(offset) }
    }
}

/// All members have published as many steps as this rank; see [`Board::turn`].
pub(crate) struct Turn<'a> {
    board: &'a mut Board,
}

impl Turn<'_> {
    /// What the members have written in the last step, and this rank's place for the next one, whose content is left
    /// over from an earlier step.
    pub fn places(&mut self) -> (Places<'_>, &mut [u8]) {
        let board = &*self.board;
        let mine = board.place(board.me, board.step.wrapping_add(1));
        // SAFETY: a place of `self.place` initialized bytes. This rank alone writes it, through this exclusive borrow of
        // the turn; nobody reads it: for step + 1 it is not published, and all steps before `step` have been read by all (module docs).
        let mine = unsafe { std::slice::from_raw_parts_mut(mine.as_ptr(), board.place) };
        (Places { board, step: board.step, life: PhantomData }, mine)
    }

    /// This rank's place for the next step.
    pub fn mine(&mut self) -> &mut [u8] {
        self.places().1
    }

    /// Ends the turn: what this rank has written can be read, what it could read cannot any more.
    pub fn publish(self) {
        let board = self.board;
        board.step = board.step.wrapping_add(1);
        board.settled = board.plan.members.len() == 1;
        board.line(board.me).publish(board.step);
    }
}

/// The places of all members in one step.
#[derive(Clone, Copy)]
pub(crate) struct Places<'a> {
    board: &'a Board,
    step: u32,
    life: PhantomData<&'a [u8]>,
}

impl<'a> Places<'a> {
    /// What the member at this position has written.
    pub fn of(&self, member: usize) -> &'a [u8] {
        let place = self.board.place(member, self.step);
        // SAFETY: a place of that many initialized bytes, published with release and seen with acquire. Its owner writes
        // there again for a step after step + 1 only, once this rank has published that, which ends this borrow.
        unsafe { std::slice::from_raw_parts(place.as_ptr(), self.board.place) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Arc;

    #[repr(C, align(4096))]
    #[derive(Clone)]
    struct Page([u8; PAGE]);

    /// Boards over memory of this process, so that Miri can watch them.
    pub(crate) fn boards(ranks: usize) -> Vec<Board> {
        let plan = BoardPlan { members: (0..ranks).map(Rank).collect(), cores: 1 };
        let pages = vec![Page([0; PAGE]); plan.bytes() / PAGE].into_boxed_slice();
        let start = NonNull::new(Box::into_raw(pages).cast::<u8>()).unwrap();
        struct Pages(NonNull<u8>, usize);
        // SAFETY: owned memory.
        unsafe impl Send for Pages {}
        // SAFETY: only its address is looked at.
        unsafe impl Sync for Pages {}
        impl Drop for Pages {
            fn drop(&mut self) {
                let pages = std::ptr::slice_from_raw_parts_mut(self.0.as_ptr().cast::<Page>(), self.1);
                // SAFETY: from `Box::into_raw` above.
                drop(unsafe { Box::from_raw(pages) });
            }
        }
        let memory = Arc::new(Pages(start, plan.bytes() / PAGE));
        let liveness = Liveness::new(ranks);
        let board = |me| {
            let (memory, liveness) = (Box::new(memory.clone()), liveness.clone());
            // SAFETY: zeroed pages of that size, held by each board, one board for each member.
            unsafe { Board::over(plan.clone(), me, start, memory, liveness, CallerBusy::default()) }
        };
        (0..ranks).map(board).collect()
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    #[test]
    fn everybody_reads_what_everybody_wrote_in_every_step() {
        let steps: u8 = if cfg!(miri) { 8 } else { 200 };
        std::thread::scope(|scope| {
            for mut board in boards(3) {
                scope.spawn(move || {
                    let me = board.position() as u8;
                    for step in 0..steps {
                        let mut turn = board.turn(&"test", soon()).unwrap();
                        let (theirs, mine) = turn.places();
                        if step > 0 {
                            for member in 0..3u8 {
                                assert_eq!(theirs.of(member.into())[..2], [member, step - 1]);
                            }
                        }
                        mine[..2].copy_from_slice(&[me, step]);
                        turn.publish();
                    }
                    // Nobody leaves before all have read.
                    board.turn(&"test", soon()).unwrap().publish();
                    board.turn(&"test", soon()).unwrap();
                });
            }
        });
    }

    #[test]
    fn a_rank_that_does_not_come_is_named() {
        let mut boards = boards(2);
        let board = &mut boards[0];
        board.turn(&"a test", soon()).unwrap().publish();
        let error = board.turn(&"a test", Deadline::after(Duration::from_millis(5))).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let text = error.to_string();
        assert!(text.contains("rank 0 in a test") && text.contains("for rank 1"), "{text}");
        // The group has ended with it.
        assert_eq!(boards[1].liveness.cause().unwrap().to_string(), text);
    }

    #[test]
    fn a_rank_that_has_left_in_good_order_is_not_waited_for() {
        let mut boards = boards(2);
        let liveness = boards[0].liveness.clone();
        boards[1].turn(&"test", soon()).unwrap().publish();
        liveness.set_peer(Rank(1), PeerState::Finished);
        boards[0].turn(&"test", soon()).unwrap().publish();
        // It had published this step before it left, but will not publish another one.
        boards[0].turn(&"test", soon()).unwrap().publish();
        let error = boards[0].turn(&"test", soon()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::PeerFinished(Rank(1)));
    }

    #[test]
    fn a_board_stays_small() {
        for ranks in 1..=64 {
            let plan = BoardPlan { members: (0..ranks).map(Rank).collect(), cores: 1 };
            assert!(plan.bytes() <= 10 << 20 && plan.place() >= 32 << 10, "{ranks}: {}", plan.bytes());
        }
        // A cache line for each peer, however many there are.
        let plan = BoardPlan { members: (0..1024).map(Rank).collect(), cores: 1 };
        assert!(plan.place() - PAGE >= 1023 * 64, "{}", plan.place());
    }
}
