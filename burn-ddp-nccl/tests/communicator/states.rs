//! All calls in all orders on a communicator in every state: no hang, no panic, freed once.

use std::time::Duration;

use burn_ddp::{DType, Error, ErrorKind, Rank, ReduceOp, Result};
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::transport::Liveness;
use burn_ddp_nccl::{NcclComm, Span, UniqueId};

use super::failures::freed;
use super::node::{Buffer, LIMIT};
use crate::fake::{self, FakeStream, Script, Step, symbols};
use crate::harness::{Case, Launch};

pub const CASES: &[(&str, Case)] = &[("states", states)];

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// The group has ended before the connect.
    NeverConnected,
    InitRefused,
    InitFailed,
    InitLate,
    Ready,
    InFlight,
    /// A collective in flight never ends.
    Hung,
    Waited,
    AsyncError,
    Late,
    GroupEnded,
    Aborted,
    Finished,
}

const STATES: [State; 13] = [
    State::NeverConnected,
    State::InitRefused,
    State::InitFailed,
    State::InitLate,
    State::Ready,
    State::InFlight,
    State::Hung,
    State::Waited,
    State::AsyncError,
    State::Late,
    State::GroupEnded,
    State::Aborted,
    State::Finished,
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

/// All sequences of up to three calls, equal ones included; a drop follows each.
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

/// A communicator in this state, or the error of its connect.
fn enter(state: State, liveness: &Liveness, data: &mut Buffer) -> Result<NcclComm> {
    let step = |init, collective| Script { init, collective, busy: 1, ..Script::default() };
    fake::play(match state {
        State::InitRefused => step(Step::Refuses(2), Step::Ends),
        State::InitFailed => step(Step::Fails(2), Step::Ends),
        State::InitLate => step(Step::Never, Step::Ends),
        State::Hung | State::Late => step(Step::Ends, Step::Never),
        State::AsyncError => step(Step::Ends, Step::Fails(1)),
        _ => step(Step::Ends, Step::Ends),
    });
    let end = || liveness.fail(Error::new(ErrorKind::Aborted, "the group has ended"));
    let (id, stream) = (UniqueId::new(&symbols())?, Box::new(FakeStream::new()));
    if state == State::NeverConnected {
        end();
    }
    // A deadline is followed by a second in which no control channel reports a cause.
    let limit = if state == State::InitLate { Duration::ZERO } else { LIMIT };
    let deadline = Deadline::after(limit);
    // SAFETY: the fake keeps NCCL's contract and has no device; the stream is its own.
    let mut comm =
        unsafe { NcclComm::connect(symbols(), &id, Rank(0), 1, stream, liveness.clone(), deadline)? };
    match state {
        State::InFlight | State::Hung => start(&mut comm, data)?,
        State::Waited => {
            start(&mut comm, data)?;
            comm.wait(deadline)?;
        }
        State::AsyncError | State::Late => {
            start(&mut comm, data)?;
            let limit = if state == State::Late { Duration::ZERO } else { LIMIT };
            comm.wait(Deadline::after(limit)).expect_err("by the script");
        }
        State::GroupEnded => drop(end()),
        State::Aborted => comm.abort(),
        State::Finished => comm.finish()?,
        _ => {}
    }
    Ok(comm)
}

/// Makes the calls of `order` and drops the communicator; a wait may last for `limit`.
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
            // Refused, without consequence, while a collective is in flight and after the end.
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
    for state in STATES {
        let connects = !matches!(
            state,
            State::NeverConnected | State::InitRefused | State::InitFailed | State::InitLate
        );
        for (index, order) in orders().iter().enumerate() {
            // One that failed to connect has no calls. What hangs is tried in one order of forty: each costs a second.
            let slow = matches!(state, State::Hung | State::Late);
            if (!connects && !order.is_empty()) || (slow && index % 40 != 0) {
                continue;
            }
            let liveness = Liveness::new(1);
            let entered = enter(state, &liveness, &mut data);
            assert_eq!(entered.is_ok(), connects, "{state:?}");
            assert!(!fake::group_is_open());
            if let Ok(comm) = entered {
                let limit = if slow { Duration::ZERO } else { LIMIT };
                ask(comm, order, limit, &mut data);
            }
            let begun = usize::from(!matches!(state, State::NeverConnected | State::InitRefused));
            let log = fake::log();
            let (aborts, destroys) = freed(&log);
            assert_eq!(aborts + destroys, begun, "{state:?} {order:?}: {log:?}");
            if order.is_empty() {
                let healthy = matches!(state, State::Ready | State::Waited | State::Finished);
                assert_eq!(destroys, usize::from(healthy), "{state:?}: {log:?}");
                assert_eq!(liveness.cause().is_none(), healthy, "{state:?}");
            }
            rows += 1;
        }
    }
    Ok(rows.to_string())
}

#[test]
fn every_state_is_asked_for_everything_in_every_order() {
    // Of 13 states 4 are not connected and 2 are slow.
    let orders: usize = 1 + 5 + 25 + 125;
    let rows = 4 + 7 * orders + 2 * orders.div_ceil(40);
    assert_eq!(Launch::new("states", 1).succeed(), [rows.to_string()]);
}
