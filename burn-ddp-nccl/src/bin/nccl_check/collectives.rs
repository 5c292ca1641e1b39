//! Each collective of [`NcclComm`] over plain device memory, against values that are computed here.
//!
//! Values are small whole numbers, and multiples of the number of ranks, so sums and means of each type are exact in
//! any order (a mean of floats multiplies by 1/n, which is exact for powers of two; others may be off by rounding).
#![allow(unsafe_code)]

use std::ops::Range;

use burn::tensor::{bf16, f16};
use burn_ddp_comm::collective::chunk;
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_comm::transport::Liveness;
use burn_ddp::{
    CommunicatorKind, DType, Error, ErrorKind, GroupOptions, ProcessGroup, Rank, ReduceOp, Result,
};
use burn_ddp_nccl::{NcclComm, Span, UniqueId};

use crate::Machine;
use crate::memory::{LIMIT, Memory, span};
use crate::report::Report;

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max];
const FILL: u8 = 0xAB;
const GUARD: usize = 512;
/// Elements of one span, and of several in one group.
const ONE: [usize; 1] = [100_003];
const SEVERAL: [usize; 4] = [1, 257, 4096, 65_537];

pub(crate) fn check(machine: &Machine, report: &mut Report) -> Result<()> {
    let (rank, world_size) = (machine.info.rank, machine.info.world_size);
    let mut options = GroupOptions::from_env()?;
    options.communicator = CommunicatorKind::Host;
    let group = ProcessGroup::<burn_cuda::Cuda>::new(machine.info.clone(), options, &machine.device)?;
    let id =
        if rank.is_root() { UniqueId::new(&machine.library.symbols())?.as_bytes().to_vec() } else { vec![] };
    let id = UniqueId::from_bytes(&group.broadcast_bytes(&id, Rank(0))?)?;
    let comm = machine.connect(&id, (rank, world_size), machine.queue()?, Liveness::new(world_size))?;
    let mut world = World { comm, rank: rank.0, size: world_size, wrong: None };
    report.note(format!("NCCL {}, {world_size} rank(s)", machine.library.version()));
    type Check = fn(&mut World, DType) -> Result<usize>;
    let checks: [(&str, Check); 4] = [
        ("all_reduce", World::all_reduce),
        ("broadcast", World::broadcast),
        ("reduce_scatter", World::reduce_scatter),
        ("all_gather", World::all_gather),
    ];
    for (name, check) in checks {
        for dtype in DType::ALL {
            let outcome = check(&mut world, dtype).map(|cases| format!("{cases} cases"));
            let outcome = world.wrong.take().map_or(outcome, Err);
            report.line(&format!("{name} {dtype}"), outcome);
        }
    }
    world.comm.finish()?;
    group.barrier()
}

struct World {
    comm: NcclComm,
    rank: usize,
    size: usize,
    /// The first wrong result. The rank goes on, for the others would wait for it.
    wrong: Option<Error>,
}

/// What one span of a collective sends and has to receive; places are in elements.
struct Part {
    send: Vec<f64>,
    send_at: usize,
    recv_at: usize,
    expected: Vec<f64>,
}

impl World {
    /// What `rank` has at `i`.
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

    fn all_reduce(&mut self, dtype: DType) -> Result<usize> {
        let mut cases = 0;
        for (counts, in_place, op) in shapes().flat_map(|(c, p)| OPS.map(|op| (c, p, op))) {
            let part = |&n: &usize| {
                let recv_at = if in_place { 0 } else { n };
                let (send, expected) = (self.values(self.rank, 0..n), self.reduced(op, 0..n));
                Part { send, send_at: 0, recv_at, expected }
            };
            let parts: Vec<_> = counts.iter().map(part).collect();
            let exact = op != ReduceOp::Mean || self.size.is_power_of_two();
            let what = format!("{op:?}, spans {counts:?}, in place {in_place}");
            // SAFETY: `run` gives memory that fits, and waits.
            self.run(&what, dtype, &parts, exact, |comm, spans| unsafe {
                comm.start_all_reduce(spans, dtype, op)
            })?;
            cases += 1;
        }
        Ok(cases)
    }

    fn broadcast(&mut self, dtype: DType) -> Result<usize> {
        let mut cases = 0;
        for root in 0..self.size {
            for (counts, in_place) in shapes() {
                let part = |&n: &usize| {
                    let recv_at = if in_place { 0 } else { n };
                    let (send, expected) = (self.values(self.rank, 0..n), self.values(root, 0..n));
                    Part { send, send_at: 0, recv_at, expected }
                };
                let parts: Vec<_> = counts.iter().map(part).collect();
                let what = format!("root {root}, spans {counts:?}, in place {in_place}");
                // SAFETY: `run` gives memory that fits, and waits.
                self.run(&what, dtype, &parts, true, |comm, spans| unsafe {
                    comm.start_broadcast(spans, dtype, Rank(root))
                })?;
                cases += 1;
            }
        }
        Ok(cases)
    }

    fn reduce_scatter(&mut self, dtype: DType) -> Result<usize> {
        let mut cases = 0;
        // Two that the ranks can share evenly, and two that (with several) they cannot, one with ranks that get nothing.
        for n in [self.size, self.size * 4099, self.size * 4099 + 1, self.size.max(2) - 1] {
            for (in_place, op) in [true, false].into_iter().flat_map(|p| OPS.map(|op| (p, op))) {
                let mine = chunk(n, self.size, self.rank);
                let recv_at = if in_place { mine.start } else { n };
                let (send, expected) = (self.values(self.rank, 0..n), self.reduced(op, mine));
                let parts = [Part { send, send_at: 0, recv_at, expected }];
                let exact = op != ReduceOp::Mean || self.size.is_power_of_two();
                let what = format!("{op:?}, {n} elements, in place {in_place}");
                // SAFETY: `run` gives memory that fits, and waits.
                self.run(&what, dtype, &parts, exact, |comm, spans| unsafe {
                    comm.start_reduce_scatter(spans[0], dtype, op)
                })?;
                cases += 1;
            }
        }
        Ok(cases)
    }

    fn all_gather(&mut self, dtype: DType) -> Result<usize> {
        let mut cases = 0;
        for (n, in_place) in [(1, true), (1, false), (4099, true), (4099, false)] {
            let expected = (0..self.size).flat_map(|rank| self.values(rank, 0..n)).collect();
            let (send_at, recv_at) = if in_place { (self.rank * n, 0) } else { (0, n) };
            let parts = [Part { send: self.values(self.rank, 0..n), send_at, recv_at, expected }];
            let what = format!("{n} elements, in place {in_place}");
            // SAFETY: `run` gives memory that fits, and waits.
            self.run(&what, dtype, &parts, true, |comm, spans| unsafe {
                comm.start_all_gather(spans[0], dtype)
            })?;
            cases += 1;
        }
        Ok(cases)
    }

    /// Starts a collective over memory with `parts` in it, waits, and compares.
    fn run(
        &mut self,
        what: &str,
        dtype: DType,
        parts: &[Part],
        exact: bool,
        start: impl FnOnce(&mut NcclComm, &[Span]) -> Result<()>,
    ) -> Result<()> {
        let size = dtype.size();
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
        start(&mut self.comm, &spans).map_err(|error| error.context(what))?;
        self.comm.wait(Deadline::after(LIMIT)).map_err(|error| error.context(what))?;
        for (part, memory) in parts.iter().zip(&memories) {
            if let Err(why) = part.compare(dtype, exact, &memory.read()?) {
                let wrong = Error::new(ErrorKind::Diverged, format!("{what}, rank {}: {why}", self.rank));
                self.wrong.get_or_insert(wrong);
            }
        }
        Ok(())
    }
}

/// All sizes, in place and not.
fn shapes() -> impl Iterator<Item = (&'static [usize], bool)> {
    [&ONE[..], &SEVERAL].into_iter().flat_map(|counts| [(counts, true), (counts, false)])
}

impl Part {
    /// The memory before the collective, with something behind it that must stay.
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
        // In place, NCCL may use what it was given as it likes.
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

/// Relative, for a mean: the factor is rounded, and so is each step.
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
    fn what_is_wrong_in_memory_is_found() {
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
