//! Each collective of [`NcclComm`] over plain device memory, against values that are computed here.
//!
//! Values are small whole numbers, and multiples of the number of ranks, so sums and means of each type are exact in
//! any order (a mean of floats multiplies by 1/n, which is exact for powers of two; others may be off by rounding).
#![allow(unsafe_code)]

use std::ops::Range;

use burn::tensor::{bf16, f16};
use burn_ddp::{
    CommunicatorKind, DType, Error, ErrorKind, GroupOptions, ProcessGroup, Rank, ReduceOp, Result,
};
use burn_ddp_comm::collective::chunk;
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::transport::Liveness;
use burn_ddp_nccl::{NcclComm, Span, UniqueId};

use crate::Machine;
use crate::memory::{LIMIT, Memory, span};
use crate::report::Report;

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max];
const FILL: u8 = 0xAB;
const GUARD: usize = 512;
/// Elements of a single span, and of several in one group.
const ONE: [usize; 1] = [100_003];
const SEVERAL: [usize; 4] = [1, 257, 4096, 65_537];

/// One collective of NCCL.
#[derive(Clone, Copy, Debug)]
enum Call {
    AllReduce(ReduceOp),
    Broadcast(Rank),
    ReduceScatter(ReduceOp),
    AllGather,
}

/// A call over spans of these counts, in place or not.
type Case = (Call, Vec<usize>, bool);

pub(crate) fn check(machine: &Machine, report: &mut Report) -> Result<()> {
    let (rank, world_size) = (machine.info.rank, machine.info.world_size);
    let mut options = GroupOptions::from_env()?;
    options.communicator = CommunicatorKind::Host;
    let group = ProcessGroup::<burn_cuda::Cuda>::new(machine.info.clone(), options, &machine.device)?;
    let id =
        if rank.is_root() { UniqueId::new(&machine.library.symbols())?.as_bytes().to_vec() } else { vec![] };
    let id = UniqueId::from_bytes(&group.broadcast_bytes(&id, Rank(0))?)?;
    let comm = machine.connect(&id, (rank, world_size), machine.stream()?, Liveness::new(world_size))?;
    let mut world = World { comm, rank: rank.0, size: world_size, wrong: None };
    report.note(format!("NCCL {}, {world_size} rank(s)", machine.library.version()));
    for (name, cases) in cases(world_size) {
        for dtype in DType::ALL {
            let outcome = cases.iter().try_for_each(|case| world.run(dtype, case));
            let outcome = world.wrong.take().map_or(outcome, Err);
            report.line(&format!("{name} {dtype}"), outcome.map(|()| format!("{} cases", cases.len())));
        }
    }
    world.comm.finish()?;
    group.barrier()
}

/// The cases of each collective.
fn cases(world_size: usize) -> [(&'static str, Vec<Case>); 4] {
    let combine = |calls: Vec<Call>, counts: &[Vec<usize>]| -> Vec<Case> {
        let of_call =
            |call| counts.iter().flat_map(move |n| [(call, n.clone(), true), (call, n.clone(), false)]);
        calls.into_iter().flat_map(of_call).collect()
    };
    let lists = [ONE.to_vec(), SEVERAL.to_vec()];
    // Two counts that the ranks can share evenly, and two that (with several ranks) they cannot, one of which leaves
    // ranks without elements.
    let n = world_size;
    let shared = [n, n * 4099, n * 4099 + 1, n.max(2) - 1].map(|count| vec![count]);
    [
        ("all_reduce", combine(OPS.map(Call::AllReduce).to_vec(), &lists)),
        ("broadcast", combine((0..n).map(|root| Call::Broadcast(Rank(root))).collect(), &lists)),
        ("reduce_scatter", combine(OPS.map(Call::ReduceScatter).to_vec(), &shared)),
        ("all_gather", combine(vec![Call::AllGather], &[1, 4099].map(|count| vec![count]))),
    ]
}

struct World {
    comm: NcclComm,
    rank: usize,
    size: usize,
    /// The first wrong result. The rank goes on after it, since the others would wait for it.
    wrong: Option<Error>,
}

/// One span of a collective: its input and the result that it must have; places are in elements.
struct Part {
    send: Vec<f64>,
    send_at: usize,
    recv_at: usize,
    expected: Vec<f64>,
}

impl World {
    /// Element `i` of `rank`.
    fn value(&self, rank: usize, i: usize) -> f64 {
        (self.size * ((i * 7 + rank * 5) % 3)) as f64
    }

    fn values(&self, rank: usize, range: Range<usize>) -> Vec<f64> {
        range.map(|i| self.value(rank, i)).collect()
    }

    fn reduced(&self, op: ReduceOp, range: Range<usize>) -> Vec<f64> {
        let all = |i| (0..self.size).map(move |rank| self.value(rank, i));
        range
            .map(|i| match op {
                ReduceOp::Sum => all(i).sum(),
                ReduceOp::Mean => all(i).sum::<f64>() / self.size as f64,
                ReduceOp::Min => all(i).fold(f64::INFINITY, f64::min),
                ReduceOp::Max => all(i).fold(f64::NEG_INFINITY, f64::max),
            })
            .collect()
    }

    /// A span of `n` elements of this rank for `call`.
    fn part(&self, call: Call, n: usize, in_place: bool) -> Part {
        let send = self.values(self.rank, 0..n);
        let (send_at, recv_at, expected) = match call {
            Call::AllReduce(op) => (0, 0, self.reduced(op, 0..n)),
            Call::Broadcast(root) => (0, 0, self.values(root.0, 0..n)),
            Call::ReduceScatter(op) => {
                let mine = chunk(n, self.size, self.rank);
                (0, mine.start, self.reduced(op, mine))
            }
            Call::AllGather => {
                let all = (0..self.size).flat_map(|rank| self.values(rank, 0..n));
                (self.rank * n, 0, all.collect())
            }
        };
        let (send_at, recv_at) = if in_place { (send_at, recv_at) } else { (0, n) };
        Part { send, send_at, recv_at, expected }
    }

    /// Runs one collective over device memory and compares the result.
    fn run(&mut self, dtype: DType, case: &Case) -> Result<()> {
        let (call, counts, in_place) = case;
        let what = format!("{call:?}, spans {counts:?}, in place {in_place}");
        let size = dtype.size();
        let parts: Vec<_> = counts.iter().map(|n| self.part(*call, *n, *in_place)).collect();
        let memories: Result<Vec<Memory>> =
            parts.iter().map(|part| Memory::of(&part.before(dtype))).collect();
        let memories = memories?;
        let spans: Vec<Span> = parts
            .iter()
            .zip(&memories)
            .map(|(part, memory)| {
                let (send, recv) = (memory.address(part.send_at * size), memory.address(part.recv_at * size));
                span(send, recv, part.send.len())
            })
            .collect();
        // SAFETY: the memory has room for the spans and is kept until the wait is over.
        let started = unsafe {
            match *call {
                Call::AllReduce(op) => self.comm.start_all_reduce(&spans, dtype, op),
                Call::Broadcast(root) => self.comm.start_broadcast(&spans, dtype, root),
                Call::ReduceScatter(op) => self.comm.start_reduce_scatter(spans[0], dtype, op),
                Call::AllGather => self.comm.start_all_gather(spans[0], dtype),
            }
        };
        let done = started.and_then(|()| self.comm.wait(Deadline::after(LIMIT)));
        done.map_err(|error| error.context(what.clone()))?;
        let exact = !matches!(call, Call::AllReduce(ReduceOp::Mean) | Call::ReduceScatter(ReduceOp::Mean))
            || self.size.is_power_of_two();
        for (part, memory) in parts.iter().zip(&memories) {
            if let Err(why) = part.compare(dtype, exact, &memory.read()?) {
                let wrong = Error::new(ErrorKind::Diverged, format!("{what}, rank {}: {why}", self.rank));
                self.wrong.get_or_insert(wrong);
            }
        }
        Ok(())
    }
}

impl Part {
    /// The memory before the collective, with a guard behind it that must not change.
    fn before(&self, dtype: DType) -> Vec<u8> {
        let end = (self.send_at + self.send.len()).max(self.recv_at + self.expected.len());
        let mut bytes = vec![FILL; end * dtype.size() + GUARD];
        let at = self.send_at * dtype.size();
        let send = encode(dtype, &self.send);
        bytes[at..at + send.len()].copy_from_slice(&send);
        bytes
    }

    fn compare(&self, dtype: DType, exact: bool, after: &[u8]) -> Result<(), String> {
        let size = dtype.size();
        let got = decode(dtype, &after[self.recv_at * size..(self.recv_at + self.expected.len()) * size]);
        let allowed = |expected: f64| if exact { 0.0 } else { expected.abs() * tolerance(dtype) };
        let near = |i: &usize| (got[*i] - self.expected[*i]).abs() <= allowed(self.expected[*i]);
        if let Some(i) = (0..got.len()).find(|i| !near(i)) {
            return Err(format!("element {i} is {}, expected {}", got[i], self.expected[i]));
        }
        // In place, NCCL may overwrite its input.
        let (send, recv_end) = (self.send_at * size, self.recv_at + self.expected.len());
        let sent = encode(dtype, &self.send);
        if self.recv_at >= self.send_at + self.send.len() && after[send..send + sent.len()] != sent[..] {
            return Err("what was sent has changed".into());
        }
        let end = recv_end.max(self.send_at + self.send.len()) * size;
        match after[end..].iter().all(|byte| *byte == FILL) {
            true => Ok(()),
            false => Err("bytes behind the memory have changed".into()),
        }
    }
}

/// Relative tolerance of a mean: the factor is rounded, and so is each step.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 4.0 * f64::from(f16::EPSILON),
        DType::BF16 => 4.0 * f64::from(bf16::EPSILON),
        DType::F32 => 4.0 * f64::from(f32::EPSILON),
        DType::F64 => 4.0 * f64::EPSILON,
        DType::U8 | DType::I32 | DType::I64 => 0.0,
    }
}

fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let bytes = |value: &f64| match dtype {
        DType::U8 => (*value as u8).to_ne_bytes().to_vec(),
        DType::I32 => (*value as i32).to_ne_bytes().to_vec(),
        DType::I64 => (*value as i64).to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(*value).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(*value).to_ne_bytes().to_vec(),
        DType::F32 => (*value as f32).to_ne_bytes().to_vec(),
        DType::F64 => value.to_ne_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    /// The elements' bytes as arrays.
    fn all<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        bytes.as_chunks().0.iter().map(|element| value(*element)).collect()
    }
    match dtype {
        DType::U8 => all(bytes, |element| u8::from_ne_bytes(element).into()),
        DType::I32 => all(bytes, |element| i32::from_ne_bytes(element).into()),
        DType::I64 => all(bytes, |element| i64::from_ne_bytes(element) as f64),
        DType::F16 => all(bytes, |element| f16::from_ne_bytes(element).into()),
        DType::BF16 => all(bytes, |element| bf16::from_ne_bytes(element).into()),
        DType::F32 => all(bytes, |element| f32::from_ne_bytes(element).into()),
        DType::F64 => all(bytes, f64::from_ne_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_memory_is_found() {
        for dtype in DType::ALL {
            let size = dtype.size();
            let values = vec![1.0, 2.0, 40.0];
            let part = Part { send: values.clone(), send_at: 0, recv_at: 3, expected: values.clone() };
            let mut memory = part.before(dtype);
            assert!(part.compare(dtype, true, &memory).unwrap_err().starts_with("element 0 is "));
            memory[3 * size..6 * size].copy_from_slice(&encode(dtype, &values));
            assert_eq!(part.compare(dtype, true, &memory), Ok(()));
            for (at, why) in [(0, "what was sent"), (6 * size, "bytes behind")] {
                memory[at] ^= 1;
                assert!(part.compare(dtype, true, &memory).unwrap_err().starts_with(why), "{dtype}");
                memory[at] ^= 1;
            }
        }
    }
}
