//! Ranks as threads of one process, frames through memory.
//!
//! The collectives have to be tried for many worlds, lengths and faults; threads make that a matter of
//! milliseconds, and no socket decides the outcome. So this wire keeps the whole contract of [`Transport`],
//! faults included: a dropped transport looks to its peers like a closed connection.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Header, Liveness, Transport};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;

/// How long a closed wire waits for the control channel to say why it closed.
const CLOSE_GRACE: Duration = Duration::from_millis(100);

/// The wires of a group whose ranks are threads of this process: the transport at index `r` is for the thread
/// that plays rank `r`, and ends its waits when `liveness[r]` says so.
///
/// The world is as large as `liveness` is long. Clones of one [`Liveness`] make what one rank learns known to
/// all of them; separate ones are closer to processes, each of which has its own knowledge.
pub fn loopback(liveness: &[Liveness]) -> Vec<LoopbackTransport> {
    let world_size = liveness.len();
    let mailboxes: Arc<[Mailbox]> = (0..world_size).map(|_| Mailbox::new(world_size)).collect();
    liveness
        .iter()
        .enumerate()
        .map(|(rank, liveness)| {
            let woken = mailboxes.clone();
            liveness.subscribe(move || woken[rank].wake());
            LoopbackTransport {
                rank: Rank(rank),
                liveness: liveness.clone(),
                mailboxes: mailboxes.clone(),
                failed: None,
            }
        })
        .collect()
}

/// One rank's end of a [`loopback`] group.
pub struct LoopbackTransport {
    rank: Rank,
    liveness: Liveness,
    /// By receiver.
    mailboxes: Arc<[Mailbox]>,
    failed: Option<Error>,
}

/// What has been sent to one rank and not been received by it yet.
struct Mailbox {
    inbox: Mutex<Inbox>,
    changed: Condvar,
}

struct Inbox {
    /// By sender.
    frames: Vec<VecDeque<Frame>>,
    /// By sender: it will send nothing more.
    closed: Vec<bool>,
}

struct Frame {
    header: Header,
    body: Vec<u8>,
}

impl Mailbox {
    fn new(world_size: usize) -> Self {
        let frames = (0..world_size).map(|_| VecDeque::new()).collect();
        Self { inbox: Mutex::new(Inbox { frames, closed: vec![false; world_size] }), changed: Condvar::new() }
    }

    // A panic cannot leave the inbox half-written: every update is one push or one assignment.
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the inbox and wakes its owner.
    fn update(&self, change: impl FnOnce(&mut Inbox)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Makes the owner look at its liveness again. Through the lock: a receiver that has looked but does not
    /// wait yet holds it, and would otherwise miss the notification.
    fn wake(&self) {
        self.update(|_| ());
    }
}

impl LoopbackTransport {
    fn closed_by(&self, peer: Rank, deadline: Deadline) -> Error {
        self.liveness.closed_by(peer, Deadline::after(CLOSE_GRACE.min(deadline.remaining())))
    }

    fn post(&self, to: Rank, header: &Header, body: &[&[u8]], deadline: Deadline) -> Result<()> {
        let body = body.concat();
        debug_assert_eq!(header.body, body.len() as u64, "a header must state its body's length");
        self.liveness.check()?;
        if self.mailboxes[self.rank.0].lock().closed[to.0] {
            return Err(self.closed_by(to, deadline));
        }
        let frame = Frame { header: *header, body };
        self.mailboxes[to.0].update(|inbox| inbox.frames[self.rank.0].push_back(frame));
        Ok(())
    }

    fn take(&self, from: Rank, expect: &Header, into: &mut [&mut [u8]], deadline: Deadline) -> Result<()> {
        let mailbox = &self.mailboxes[self.rank.0];
        let mut inbox = mailbox.lock();
        loop {
            self.liveness.check()?;
            if let Some(frame) = inbox.frames[from.0].pop_front() {
                drop(inbox);
                let room: usize = into.iter().map(|part| part.len()).sum();
                if frame.header != *expect || frame.body.len() != room {
                    return Err(expect.mismatch(self.rank, from, &frame.header));
                }
                let mut rest = &frame.body[..];
                for part in into {
                    let (here, behind) = rest.split_at(part.len());
                    part.copy_from_slice(here);
                    rest = behind;
                }
                return Ok(());
            }
            if inbox.closed[from.0] {
                drop(inbox);
                return Err(self.closed_by(from, deadline));
            }
            if deadline.passed() {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("{} waited {:?} for {from} in {expect}", self.rank, deadline.limit()),
                ));
            }
            for (peer, frames) in inbox.frames.iter().enumerate() {
                if let Some(frame) = frames.front()
                    && expect.contradicts(&frame.header)
                {
                    return Err(expect.mismatch(self.rank, Rank(peer), &frame.header));
                }
            }
            let left = deadline.remaining();
            inbox = mailbox.changed.wait_timeout(inbox, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The error after `lost` met the sending half of an exchange. A peer that found the ranks in different
    /// operations leaves, but its frame is here and tells more than that it left.
    fn better_reason(&self, lost: Error, from: Rank, expect: &Header) -> Error {
        match self.mailboxes[self.rank.0].lock().frames[from.0].front() {
            Some(frame) if frame.header != *expect => expect.mismatch(self.rank, from, &frame.header),
            _ => lost,
        }
    }

    /// Runs `call` unless an earlier one has failed; the first error stays.
    fn unless_failed(&mut self, call: impl FnOnce(&Self) -> Result<()>) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let result = call(self);
        self.failed = result.as_ref().err().cloned();
        result
    }
}

impl Transport for LoopbackTransport {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.mailboxes.len()
    }

    fn send(&mut self, to: Rank, header: &Header, body: &[&[u8]], deadline: Deadline) -> Result<()> {
        self.unless_failed(|wire| wire.post(to, header, body, deadline))
    }

    fn recv(
        &mut self,
        from: Rank,
        expect: &Header,
        body: &mut [&mut [u8]],
        deadline: Deadline,
    ) -> Result<()> {
        self.unless_failed(|wire| wire.take(from, expect, body, deadline))
    }

    fn send_recv(
        &mut self,
        to: Rank,
        header: &Header,
        body: &[&[u8]],
        from: Rank,
        expect: &Header,
        into: &mut [&mut [u8]],
        deadline: Deadline,
    ) -> Result<()> {
        self.unless_failed(|wire| {
            wire.post(to, header, body, deadline)
                .map_err(|error| match error.kind() {
                    ErrorKind::PeerLost(_) => wire.better_reason(error, from, expect),
                    _ => error,
                })
                .and_then(|()| wire.take(from, expect, into, deadline))
        })
    }
}

impl Drop for LoopbackTransport {
    fn drop(&mut self) {
        for mailbox in self.mailboxes.iter() {
            mailbox.update(|inbox| inbox.closed[self.rank.0] = true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::dtype::ReduceOp;
    use crate::operation::Operation;
    use crate::transport::PeerState;
    use std::time::Instant;

    fn pair() -> (Vec<Liveness>, LoopbackTransport, LoopbackTransport) {
        let liveness = vec![Liveness::new(2), Liveness::new(2)];
        let mut wires = loopback(&liveness);
        let second = wires.pop().unwrap();
        (liveness, wires.pop().unwrap(), second)
    }

    fn header(kind: Operation, sequence: u64, body: usize) -> Header {
        Header::new(kind, sequence, DType::U8, body).with_body(0, body)
    }

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(5))
    }

    #[test]
    fn frames_arrive_in_order_even_after_the_sender_left() {
        let (_, mut a, mut b) = pair();
        for (sequence, body) in [(0, &b"one"[..]), (1, b"")] {
            a.send(Rank(1), &header(Operation::Barrier, sequence, body.len()), &[body], soon()).unwrap();
        }
        drop(a);
        let mut into = [0; 3];
        b.recv(Rank(0), &header(Operation::Barrier, 0, 3), &mut [&mut into], soon()).unwrap();
        assert_eq!(&into, b"one");
        b.recv(Rank(0), &header(Operation::Barrier, 1, 0), &mut [], soon()).unwrap();
        let lost = b.recv(Rank(0), &header(Operation::Barrier, 2, 0), &mut [], soon()).unwrap_err();
        assert_eq!(lost.kind(), ErrorKind::PeerLost(Rank(0)));
    }

    #[test]
    fn a_body_may_be_cut_elsewhere_on_arrival() {
        let (_, mut a, mut b) = pair();
        a.send(Rank(1), &header(Operation::Barrier, 0, 5), &[b"ab", b"", b"cde"], soon()).unwrap();
        let (mut first, mut second) = ([0; 4], [0; 1]);
        b.recv(Rank(0), &header(Operation::Barrier, 0, 5), &mut [&mut first, &mut [], &mut second], soon())
            .unwrap();
        assert_eq!((&first, &second), (b"abcd", b"e"));
    }

    #[test]
    fn a_departed_peers_frame_explains_more_than_its_departure() {
        let (_, mut a, mut b) = pair();
        a.send(Rank(1), &header(Operation::Barrier, 0, 0), &[], soon()).unwrap();
        drop(a);
        let mine = header(Operation::Broadcast(Rank(0)), 0, 0);
        let error = b.send_recv(Rank(0), &mine, &[], Rank(0), &mine, &mut [], soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
    }

    #[test]
    fn a_wait_ends_at_its_deadline_and_the_first_error_stays() {
        let (_, _a, mut b) = pair();
        let expect = header(Operation::AllReduce(ReduceOp::Sum), 7, 0);
        let deadline = Deadline::after(Duration::from_millis(20));
        let first = b.recv(Rank(0), &expect, &mut [], deadline).unwrap_err();
        assert_eq!(first.kind(), ErrorKind::Timeout);
        for part in ["rank 1", "rank 0", "all_reduce #7", "20ms"] {
            assert!(first.to_string().contains(part), "{first}");
        }
        let later = b.send(Rank(0), &expect, &[], soon()).unwrap_err();
        assert_eq!(later.to_string(), first.to_string());
    }

    #[test]
    fn an_abort_wakes_a_blocked_receiver() {
        let (liveness, _a, mut b) = pair();
        let began = Instant::now();
        let blocked =
            std::thread::spawn(move || b.recv(Rank(0), &header(Operation::Barrier, 0, 0), &mut [], soon()));
        liveness[1].fail(Error::new(ErrorKind::Aborted, "stop"));
        assert_eq!(blocked.join().unwrap().unwrap_err().kind(), ErrorKind::Aborted);
        assert!(began.elapsed() < Duration::from_secs(2));
    }

    #[test]
    fn a_finished_peer_is_told_from_a_lost_one() {
        let (liveness, a, mut b) = pair();
        liveness[1].set_peer(Rank(0), PeerState::Finished);
        drop(a);
        let error = b.send(Rank(0), &header(Operation::Barrier, 0, 0), &[], soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerFinished(Rank(0)));
    }
}
