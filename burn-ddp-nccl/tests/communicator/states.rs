//! A communicator in every state is asked for everything in every order: no hang, no panic, freed once.

use std::time::Duration;

use burn_ddp::deadline::Deadline;
use burn_ddp::transport::Liveness;
use burn_ddp::{DType, Error, ErrorKind, Rank, ReduceOp, Result};
use burn_ddp_nccl::{NcclComm, Span, UniqueId};

use super::failures::freed;
use super::node::{Buffer, LIMIT};
use crate::fake::{self, FakeQueue, Script, Step, symbols};
use crate::harness::{Case, Launch};

pub const CASES: &[(&str, Case)] = &[("states", states)];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// The group has ended before.
    NeverConnected,
    InitRefused,
    InitFailed,
    InitLate,
    Ready,
    InFlight,
    /// In flight, and without end.
    Hung,
    Waited,
    AsyncError,
    Late,
    GroupEnded,
    Aborted,
    Finished,
}

const WAYS: [Way; 13] = [
    Way::NeverConnected,
    Way::InitRefused,
    Way::InitFailed,
    Way::InitLate,
    Way::Ready,
    Way::InFlight,
    Way::Hung,
    Way::Waited,
    Way::AsyncError,
    Way::Late,
    Way::GroupEnded,
    Way::Aborted,
    Way::Finished,
];

#[derive(Clone, Copy, Debug)]
enum Ask {
    Abort,
    Error,
    Wait,
    Start,
    Finish,
}

const ASKS: [Ask; 5] = [Ask::Abort, Ask::Error, Ask::Wait, Ask::Start, Ask::Finish];

/// All sequences of up to three different or equal questions; a drop follows each.
fn orders() -> Vec<Vec<Ask>> {
    let mut all = vec![vec![]];
    let mut longest = all.clone();
    for _ in 0..3 {
        let longer = |order: &Vec<Ask>| ASKS.map(|ask| [order.as_slice(), &[ask]].concat());
        longest = longest.iter().flat_map(longer).collect();
        all.extend(longest.clone());
    }
    all
}

fn start(comm: &mut NcclComm, data: &mut Buffer) -> Result<()> {
    let span = Span { send: data.pointer(), recv: data.pointer(), count: 2 };
    // SAFETY: the data outlives the communicator.
    unsafe { comm.start_all_reduce(&[span], DType::F32, ReduceOp::Sum) }
}

/// A communicator that went this way, or the error that it ended with before it was one.
fn go(way: Way, liveness: &Liveness, data: &mut Buffer) -> Result<NcclComm> {
    let step = |init, collective| Script { init, collective, busy: 1, ..Script::default() };
    fake::play(match way {
        Way::InitRefused => step(Step::Refuses(2), Step::Ends),
        Way::InitFailed => step(Step::Fails(2), Step::Ends),
        Way::InitLate => step(Step::Never, Step::Ends),
        Way::Hung | Way::Late => step(Step::Ends, Step::Never),
        Way::AsyncError => step(Step::Ends, Step::Fails(1)),
        _ => step(Step::Ends, Step::Ends),
    });
    let end = || liveness.fail(Error::new(ErrorKind::Aborted, "the group has ended"));
    let (id, queue) = (UniqueId::new(&symbols())?, Box::new(FakeQueue::new()));
    if way == Way::NeverConnected {
        end();
    }
    // Nobody else is there to explain a deadline, so each costs a second.
    let limit = if way == Way::InitLate { Duration::ZERO } else { LIMIT };
    let deadline = Deadline::after(limit);
    // SAFETY: the fake keeps NCCL's contract and has no device; the queue is its own.
    let mut comm =
        unsafe { NcclComm::connect(symbols(), &id, Rank(0), 1, queue, liveness.clone(), deadline)? };
    match way {
        Way::InFlight | Way::Hung => start(&mut comm, data)?,
        Way::Waited => {
            start(&mut comm, data)?;
            comm.wait(deadline)?;
        }
        Way::AsyncError | Way::Late => {
            start(&mut comm, data)?;
            let limit = if way == Way::Late { Duration::ZERO } else { LIMIT };
            comm.wait(Deadline::after(limit)).expect_err("by the script");
        }
        Way::GroupEnded => drop(end()),
        Way::Aborted => comm.abort(),
        Way::Finished => comm.finish()?,
        _ => {}
    }
    Ok(comm)
}

/// Asks in this order and drops; a wait may last for `limit`.
fn ask(mut comm: NcclComm, order: &[Ask], limit: Duration, data: &mut Buffer) {
    let mut cause: Option<String> = None;
    for ask in order {
        let failed = match ask {
            Ask::Abort => {
                comm.abort();
                None
            }
            Ask::Error => comm.error(),
            Ask::Wait => comm.wait(Deadline::after(limit)).err(),
            // Refused, without consequence, while something is in flight and after the end.
            Ask::Start => start(&mut comm, data).err().filter(|error| error.kind() != ErrorKind::Config),
            Ask::Finish => comm.finish().err(),
        };
        // The first cause stays.
        if let Some(cause) = &cause {
            let later = comm.error().map(|error| error.to_string());
            assert_eq!(later.as_ref(), Some(cause), "{order:?}");
        }
        cause = cause.or(failed.map(|error| error.to_string()));
    }
}

fn states() -> Result<String> {
    let (mut data, mut rows) = (Buffer::new(&[0; 8]), 0);
    for way in WAYS {
        let connects =
            !matches!(way, Way::NeverConnected | Way::InitRefused | Way::InitFailed | Way::InitLate);
        for (index, order) in orders().iter().enumerate() {
            // One that failed to connect cannot be asked. What hangs is asked in one order of forty: each costs a second.
            let slow = matches!(way, Way::Hung | Way::Late);
            if (!connects && !order.is_empty()) || (slow && index % 40 != 0) {
                continue;
            }
            let liveness = Liveness::new(1);
            let gone = go(way, &liveness, &mut data);
            assert_eq!(gone.is_ok(), connects, "{way:?}");
            assert!(!fake::group_is_open());
            if let Ok(comm) = gone {
                let limit = if slow { Duration::ZERO } else { LIMIT };
                ask(comm, order, limit, &mut data);
            }
            let begun = usize::from(!matches!(way, Way::NeverConnected | Way::InitRefused));
            let log = fake::log();
            let (aborts, destroys) = freed(&log);
            assert_eq!(aborts + destroys, begun, "{way:?} {order:?}: {log:?}");
            if order.is_empty() {
                let healthy = matches!(way, Way::Ready | Way::Waited | Way::Finished);
                assert_eq!(destroys, usize::from(healthy), "{way:?}: {log:?}");
                assert_eq!(liveness.cause().is_none(), healthy, "{way:?}");
            }
            rows += 1;
        }
    }
    Ok(rows.to_string())
}

#[test]
fn every_state_is_asked_for_everything_in_every_order() {
    // Of 13 ways 4 do not connect and 2 are slow.
    let orders: usize = 1 + 5 + 25 + 125;
    let rows = 4 + 7 * orders + 2 * orders.div_ceil(40);
    assert_eq!(Launch::new("states", 1).succeed(), [rows.to_string()]);
}
