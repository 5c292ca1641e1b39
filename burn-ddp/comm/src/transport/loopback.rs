//! A transport between threads of one process, for tests.
//!
//! Collectives are tested for many world sizes, lengths and faults; with threads that takes milliseconds, and no socket
//! influences the outcome. This transport keeps the whole contract of [`Transport`], faults included: a dropped
//! transport looks to its peers like a closed connection.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::{Header, Liveness, Transport};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::watched::Watched;

/// Time for the control channel to tell the reason for which a connection closed.
const CLOSE_GRACE: Duration = Duration::from_millis(100);

/// The transports of a group whose ranks are threads of this process: the one at index `r` is for the thread of rank
/// `r`, and ends its waits when `liveness[r]` learns that the group has failed.
///
/// The world is as large as `liveness` is long. With clones of one [`Liveness`] all ranks learn what one of them
/// learns; with separate ones each rank has its own knowledge, as processes do.
pub fn loopback(liveness: &[Liveness]) -> Vec<LoopbackTransport> {
    let world_size = liveness.len();
    let empty = || Inbox {
        frames: (0..world_size).map(|_| VecDeque::new()).collect(),
        closed: vec![false; world_size],
    };
    let inboxes: Arc<[Watched<Inbox>]> = (0..world_size).map(|_| Watched::new(empty())).collect();
    let transport = |(rank, liveness): (usize, &Liveness)| {
        let woken = inboxes.clone();
        // The update takes the lock, so it cannot fall between a receiver's look at the liveness and its wait.
        liveness.subscribe(move || woken[rank].update(|_| ()));
        let (liveness, inboxes) = (liveness.clone(), inboxes.clone());
        LoopbackTransport { rank: Rank(rank), liveness, inboxes, failed: None }
    };
    liveness.iter().enumerate().map(transport).collect()
}

/// One rank's end of a [`loopback`] group.
pub struct LoopbackTransport {
    rank: Rank,
    liveness: Liveness,
    /// By receiver.
    inboxes: Arc<[Watched<Inbox>]>,
    failed: Option<Error>,
}

/// Frames that were sent to one rank and that it has not received yet.
struct Inbox {
    /// By sender.
    frames: Vec<VecDeque<SentFrame>>,
    /// By sender; set when it will send nothing more.
    closed: Vec<bool>,
}

struct SentFrame {
    header: Header,
    body: Vec<u8>,
}

impl LoopbackTransport {
    fn closed_by(&self, peer: Rank, deadline: Deadline) -> Error {
        self.liveness.closed_by(peer, Deadline::after(CLOSE_GRACE.min(deadline.remaining())))
    }

    fn deliver(&self, to: Rank, header: &Header, body: &[&[u8]], deadline: Deadline) -> Result<()> {
        let body = body.concat();
        debug_assert_eq!(header.body, body.len() as u64, "a header must state its body's length");
        self.liveness.check()?;
        if self.inboxes[self.rank.0].lock().closed[to.0] {
            return Err(self.closed_by(to, deadline));
        }
        let frame = SentFrame { header: *header, body };
        self.inboxes[to.0].update(|inbox| inbox.frames[self.rank.0].push_back(frame));
        Ok(())
    }

    /// Waits for the next frame of `from`; `None` when it has closed its end.
    fn next_frame(&self, from: Rank, expect: &Header, deadline: Deadline) -> Result<Option<SentFrame>> {
        let frame = self.inboxes[self.rank.0].wait_for(deadline, |inbox| {
            if let Err(cause) = self.liveness.check() {
                return Some(Err(cause));
            }
            if let Some(frame) = inbox.frames[from.0].pop_front() {
                return Some(Ok(Some(frame)));
            }
            if inbox.closed[from.0] {
                return Some(Ok(None));
            }
            inbox.frames.iter().enumerate().find_map(|(peer, frames)| {
                let frame = frames.front().filter(|frame| expect.contradicts(&frame.header))?;
                Some(Err(expect.mismatch(self.rank, Rank(peer), &frame.header)))
            })
        });
        frame.unwrap_or_else(|| {
            Err(Error::new(
                ErrorKind::Timeout,
                format!("{} waited {:?} for {from} in {expect}", self.rank, deadline.limit()),
            ))
        })
    }

    fn receive(&self, from: Rank, expect: &Header, into: &mut [&mut [u8]], deadline: Deadline) -> Result<()> {
        let Some(frame) = self.next_frame(from, expect, deadline)? else {
            return Err(self.closed_by(from, deadline));
        };
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
        Ok(())
    }

    /// The error after the sending half of an exchange has failed with `lost`. A peer that leaves because the ranks are
    /// in different operations has sent its frame before, which explains more.
    fn explain(&self, lost: Error, from: Rank, expect: &Header) -> Error {
        match self.inboxes[self.rank.0].lock().frames[from.0].front() {
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
        self.inboxes.len()
    }

    fn send(&mut self, to: Rank, header: &Header, body: &[&[u8]], deadline: Deadline) -> Result<()> {
        self.unless_failed(|this| this.deliver(to, header, body, deadline))
    }

    fn recv(
        &mut self,
        from: Rank,
        expect: &Header,
        body: &mut [&mut [u8]],
        deadline: Deadline,
    ) -> Result<()> {
        self.unless_failed(|this| this.receive(from, expect, body, deadline))
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
        self.unless_failed(|this| {
            this.deliver(to, header, body, deadline)
                .map_err(|error| match error.kind() {
                    ErrorKind::PeerLost(_) => this.explain(error, from, expect),
                    _ => error,
                })
                .and_then(|()| this.receive(from, expect, into, deadline))
        })
    }
}

impl Drop for LoopbackTransport {
    fn drop(&mut self) {
        for inbox in self.inboxes.iter() {
            inbox.update(|inbox| inbox.closed[self.rank.0] = true);
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
