//! One communicator of the fake: its answers to polls, and the time when its work reaches the stream.

use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::wire::{Wire, meet};
use super::work::Work;
use super::{IN_PROGRESS, REMOTE_ERROR, SUCCESS, Step, lock, note, script, stream};

pub(super) struct Comm {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Number of "in progress" answers still to be given.
    busy: u32,
    /// The call that was started never ends.
    hangs: bool,
    /// The thread that connects still runs.
    connecting: bool,
    /// The code that is reported when nothing is in progress any more.
    later: c_int,
    error: c_int,
    wire: Option<Arc<Wire>>,
    planned: Vec<(usize, Work)>,
    running: usize,
    aborted: bool,
}

impl Comm {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), changed: Condvar::new() })
    }

    /// Starts a call with the outcome `step`; returns the result of the call.
    pub(super) fn begin(self: &Arc<Self>, step: Step) -> c_int {
        let mut state = lock(&self.state);
        state.busy = script().busy;
        state.hangs = step == Step::Never;
        if let Step::Fails(code) = step {
            state.later = code;
        }
        if state.busy > 0 || step != Step::Ends {
            return IN_PROGRESS;
        }
        self.enqueue(&mut state);
        SUCCESS
    }

    /// Adds work that is enqueued when the next call has ended.
    pub(super) fn plan(&self, stream: usize, work: Work) {
        lock(&self.state).planned.push((stream, work));
    }

    /// The result of `ncclCommGetAsyncError`.
    pub(super) fn answer(self: &Arc<Self>) -> c_int {
        let mut state = lock(&self.state);
        if state.error != SUCCESS {
            return state.error;
        }
        if state.busy > 0 {
            state.busy -= 1;
            return IN_PROGRESS;
        }
        if state.hangs || state.connecting {
            return IN_PROGRESS;
        }
        state.error = state.later;
        if state.error == SUCCESS {
            self.enqueue(&mut state);
        }
        state.error
    }

    fn enqueue(self: &Arc<Self>, state: &mut State) {
        if !state.planned.is_empty() {
            note("enqueued");
        }
        for (number, work) in state.planned.drain(..) {
            let this = self.clone();
            stream::enqueue(number, Box::new(move || this.run(&work)));
        }
    }

    /// Connects on a thread, as NCCL's non-blocking start does.
    pub(super) fn connect(self: &Arc<Self>, id: &[u8], rank: usize, world_size: usize) {
        lock(&self.state).connecting = true;
        let (this, id) = (self.clone(), id.to_vec());
        std::thread::spawn(move || {
            let met = meet(&id, rank, world_size);
            let mut state = lock(&this.state);
            state.connecting = false;
            match met {
                // After an abort in the meantime this thread is the last owner.
                Ok(wire) => state.wire = (!state.aborted).then(|| Arc::new(wire)),
                Err(error) => {
                    eprintln!("fake: rank {rank}: {error}");
                    state.error = REMOTE_ERROR;
                }
            }
        });
    }

    /// Runs `work` on the thread of a stream. An error is kept in the state, and the work then hangs until the abort,
    /// as a kernel does.
    fn run(&self, work: &Work) {
        let mut state = lock(&self.state);
        if state.aborted {
            return;
        }
        let wire = state.wire.clone().expect("work on a communicator that is connected");
        state.running += 1;
        state = match script().collective {
            Step::Never => self.hang(state),
            Step::Fails(code) => {
                state.error = code;
                self.hang(state)
            }
            _ => {
                drop(state);
                // SAFETY: the memory is valid until the work is done or aborted, and an abort waits for this.
                let done = unsafe { work.run(&mut lock(&wire.collectives)) };
                let mut state = lock(&self.state);
                if done.is_err() {
                    state.error = REMOTE_ERROR;
                    state = self.hang(state);
                }
                state
            }
        };
        state.running -= 1;
        self.changed.notify_all();
    }

    fn hang<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait_while(state, |state| !state.aborted).unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all work and waits until it has ended.
    pub(super) fn abort(&self) {
        let mut state = lock(&self.state);
        state.aborted = true;
        if let Some(wire) = &state.wire {
            wire.cut();
        }
        self.changed.notify_all();
        let idle = self.changed.wait_while(state, |state| state.running > 0);
        drop(idle.unwrap_or_else(PoisonError::into_inner));
    }
}
