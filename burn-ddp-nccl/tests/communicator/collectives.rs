//! Every collective, dtype and reduction, in place and out of place, against values computed here.

use burn_ddp::{DType, Error, ErrorKind, Rank, ReduceOp, Result};
use burn_ddp_comm::deadline::Deadline;
use burn_ddp_nccl::{NcclComm, Span};

use super::node::{Buffer, LIMIT, Node};
use crate::fake::{self, Script};
use crate::harness::{Case, Launch, argument};

pub const CASES: &[(&str, Case)] = &[("communicator collectives", collectives), ("order", order)];

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max];

/// Element `index` of `rank`: a multiple of 12, so that a mean of up to four is whole, and small enough that every sum
/// is exact in every dtype.
fn value(rank: usize, index: usize) -> u32 {
    12 * ((3 * rank + index) % 5) as u32
}

fn reduced(op: ReduceOp, world_size: usize, index: usize) -> u32 {
    let values = (0..world_size).map(|rank| value(rank, index));
    match op {
        ReduceOp::Sum => values.sum(),
        ReduceOp::Mean => values.sum::<u32>() / world_size as u32,
        ReduceOp::Min => values.min().unwrap(),
        ReduceOp::Max => values.max().unwrap(),
    }
}

/// `number` in the memory of `dtype`.
fn encode(dtype: DType, number: u32) -> Vec<u8> {
    let bits = (number as f32).to_bits();
    match dtype {
        DType::U8 => vec![number as u8],
        DType::I32 => (number as i32).to_ne_bytes().to_vec(),
        DType::I64 => i64::from(number).to_ne_bytes().to_vec(),
        // Five bits of exponent around 15 and ten of fraction.
        DType::F16 if number == 0 => vec![0; 2],
        DType::F16 => {
            ((((bits >> 23) - 127 + 15) << 10 | (bits >> 13 & 0x3ff)) as u16).to_ne_bytes().to_vec()
        }
        DType::BF16 => ((bits >> 16) as u16).to_ne_bytes().to_vec(),
        DType::F32 => (number as f32).to_ne_bytes().to_vec(),
        DType::F64 => f64::from(number).to_ne_bytes().to_vec(),
    }
}

fn encoded(dtype: DType, numbers: impl IntoIterator<Item = u32>) -> Vec<u8> {
    numbers.into_iter().flat_map(|number| encode(dtype, number)).collect()
}

/// One rank at work.
struct Bench {
    comm: NcclComm,
    checks: usize,
}

impl Bench {
    fn wait(&mut self) -> Result<()> {
        self.comm.wait(Deadline::after(LIMIT))
    }

    fn check(&mut self, what: &str, got: &[u8], expected: &[u8]) -> Result<()> {
        self.checks += 1;
        if got == expected {
            return Ok(());
        }
        let at = got.iter().zip(expected).position(|(got, expected)| got != expected);
        Err(Error::new(
            ErrorKind::Diverged,
            format!("{what} on {}: wrong from byte {at:?}", self.comm.rank()),
        ))
    }

    fn mine(&self, dtype: DType, count: usize) -> Vec<u8> {
        encoded(dtype, (0..count).map(|index| value(self.comm.rank().0, index)))
    }

    /// Several spans in one group.
    fn all_reduce(&mut self, dtype: DType, op: ReduceOp, in_place: bool) -> Result<()> {
        const COUNTS: [usize; 4] = [1, 0, 3000, 37];
        let mut sends = COUNTS.map(|count| Buffer::new(&self.mine(dtype, count)));
        let mut outs = COUNTS.map(|count| Buffer::new(&vec![0xAA; count * dtype.size()]));
        let spans: Vec<Span> = (0..COUNTS.len())
            .map(|part| {
                let send = sends[part].pointer();
                let recv = if in_place { send } else { outs[part].pointer() };
                Span { send, recv, count: COUNTS[part] }
            })
            .collect();
        // SAFETY: the buffers are not touched before the wait.
        unsafe { self.comm.start_all_reduce(&spans, dtype, op)? };
        self.wait()?;
        for part in 0..COUNTS.len() {
            let all = (0..COUNTS[part]).map(|index| reduced(op, self.comm.world_size(), index));
            let result = if in_place { &sends[part] } else { &outs[part] };
            self.check(&format!("all_reduce {op} {dtype}"), &result.bytes(), &encoded(dtype, all))?;
            if !in_place {
                let mine = self.mine(dtype, COUNTS[part]);
                self.check("what all_reduce was given", &sends[part].bytes(), &mine)?;
            }
        }
        Ok(())
    }

    fn broadcast(&mut self, dtype: DType, root: Rank, in_place: bool) -> Result<()> {
        const COUNTS: [usize; 2] = [5, 2000];
        let mut sends = COUNTS.map(|count| Buffer::new(&self.mine(dtype, count)));
        let mut outs = COUNTS.map(|count| Buffer::new(&vec![0xAA; count * dtype.size()]));
        let spans = [0, 1].map(|part| {
            let send = sends[part].pointer();
            let recv = if in_place { send } else { outs[part].pointer() };
            Span { send, recv, count: COUNTS[part] }
        });
        // SAFETY: the buffers are not touched before the wait.
        unsafe { self.comm.start_broadcast(&spans, dtype, root)? };
        self.wait()?;
        for part in 0..COUNTS.len() {
            let theirs = encoded(dtype, (0..COUNTS[part]).map(|index| value(root.0, index)));
            let result = if in_place { &sends[part] } else { &outs[part] };
            self.check(&format!("broadcast {dtype} of {root}"), &result.bytes(), &theirs)?;
        }
        Ok(())
    }

    fn reduce_scatter(&mut self, dtype: DType, op: ReduceOp, count: usize, in_place: bool) -> Result<()> {
        let (rank, world_size) = (self.comm.rank().0, self.comm.world_size());
        // The first `count % world_size` ranks have one element more.
        let length = |rank| count / world_size + usize::from(rank < count % world_size);
        let start: usize = (0..rank).map(length).sum();
        let (mine, size) = (start..start + length(rank), dtype.size());
        let given = self.mine(dtype, count);
        let mut send = Buffer::new(&given);
        // One element behind the room for the chunk, which must stay as it is.
        let mut out = Buffer::new(&vec![0xAA; (mine.len() + 1) * size]);
        let place = send.pointer().wrapping_byte_add(start * size);
        let recv = if in_place { place } else { out.pointer() };
        let span = Span { send: send.pointer(), recv, count };
        // SAFETY: the buffers are not touched before the wait.
        unsafe { self.comm.start_reduce_scatter(span, dtype, op)? };
        self.wait()?;
        let mut expected = encoded(dtype, mine.clone().map(|index| reduced(op, world_size, index)));
        let what = format!("reduce_scatter {op} {dtype} of {count}");
        if in_place {
            return self.check(&what, &send.bytes()[mine.start * size..mine.end * size], &expected);
        }
        expected.extend(vec![0xAA; size]);
        self.check(&what, &out.bytes(), &expected)?;
        self.check("what reduce_scatter was given", &send.bytes(), &given)
    }

    fn all_gather(&mut self, dtype: DType, count: usize, in_place: bool) -> Result<()> {
        let (rank, world_size) = (self.comm.rank().0, self.comm.world_size());
        let mine = self.mine(dtype, count);
        let mut room = vec![0xAA; mine.len() * world_size];
        if in_place {
            room[rank * mine.len()..(rank + 1) * mine.len()].copy_from_slice(&mine);
        }
        let (mut send, mut out) = (Buffer::new(&mine), Buffer::new(&room));
        let place = out.pointer().wrapping_byte_add(rank * mine.len());
        let from = if in_place { place } else { send.pointer() };
        // SAFETY: the buffers are not touched before the wait.
        unsafe { self.comm.start_all_gather(Span { send: from, recv: out.pointer(), count }, dtype)? };
        self.wait()?;
        let all = (0..world_size).flat_map(|rank| (0..count).map(move |index| value(rank, index)));
        self.check(&format!("all_gather {dtype} of {count}"), &out.bytes(), &encoded(dtype, all))
    }
}

/// Runs all of them in a communicator that answers "in progress" as often as the argument says.
fn collectives() -> Result<String> {
    fake::play(Script { busy: argument().parse().unwrap(), ..Script::default() });
    let node = Node::connect_tcp()?;
    let mut bench = Bench { comm: node.connect(LIMIT)?, checks: 0 };
    let world_size = node.world_size;
    for in_place in [false, true] {
        for dtype in DType::ALL {
            for op in OPS {
                bench.all_reduce(dtype, op, in_place)?;
                for count in [0, 1, 100 * world_size, 700 * world_size + world_size / 2] {
                    bench.reduce_scatter(dtype, op, count, in_place)?;
                }
            }
            for root in 0..world_size {
                bench.broadcast(dtype, Rank(root), in_place)?;
            }
            for count in [0, 1, 1000] {
                bench.all_gather(dtype, count, in_place)?;
            }
        }
    }
    bench.comm.finish()?;
    Ok(bench.checks.to_string())
}

#[test]
fn every_collective_dtype_and_reduction() {
    for (world_size, busy) in [(1, 0), (2, 0), (3, 40), (4, 3)] {
        // Out of place: 8 of all_reduce and 2 of each reduce_scatter for an op; in place: half.
        let ops = OPS.len() * (8 + 2 * 4);
        let checks = DType::ALL.len() * (ops + ops / 2 + 2 * (2 * world_size + 3));
        for counted in Launch::new("communicator collectives", world_size).argument(busy).succeed() {
            assert_eq!(counted, checks.to_string(), "{world_size} ranks");
        }
    }
}

/// The calls of NCCL, in order.
fn order() -> Result<String> {
    fake::play(Script { busy: 3, ..Script::default() });
    let node = Node::connect_tcp()?;
    let mut comm = node.connect(LIMIT)?;
    let mut data = Buffer::new(&[1; 60]);
    let whole = Span { send: data.pointer(), recv: data.pointer(), count: 15 };
    let half = Span { count: 7, ..whole };
    // SAFETY: only NCCL uses the data.
    unsafe {
        comm.start_all_reduce(&[half, Span { recv: half.recv, ..half }], DType::F32, ReduceOp::Sum)?;
        comm.wait(Deadline::after(LIMIT))?;
        comm.start_reduce_scatter(whole, DType::F32, ReduceOp::Sum)?;
    }
    comm.wait(Deadline::after(LIMIT))?;
    comm.wait(Deadline::after(LIMIT))?;
    drop(comm);
    Ok(fake::log().join(", "))
}

#[test]
fn calls_come_in_order_and_the_event_after_the_work() {
    let ended = "group_end, in progress, enqueued, record";
    let expected = format!(
        "init, in progress, group_start, all_reduce, all_reduce, {ended}, \
         group_start, reduce, reduce, {ended}, finalize, in progress, destroy"
    );
    for log in Launch::new("order", 2).succeed() {
        assert_eq!(log, expected);
    }
}
