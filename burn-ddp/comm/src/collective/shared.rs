//! The collectives of ranks that share one host's memory.
//!
//! Everything is done in steps of the [`SharedRegion`]: all write on their places, publish, and read. What is a message over a
//! wire is nothing here, and sums are taken straight out of the places of the others and this rank's own segments.
//! Large data goes through in blocks, so that what one rank has written is still in a cache when the others read it.
//! All ranks take the same number of steps for the same operation, count and lengths, and the first step of each
//! operation brings everybody's header to everybody.

use std::ops::Range;

use super::chunk::chunk;
use super::scratch::Scratch;
use super::segments::Segments;
use crate::deadline::Deadline;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::reduction::{reduce_in_place, reduce_in_place_and};
use crate::shm::{PublishedSlots, SharedRegion};
use crate::transport::Header;

/// Bytes in front of the data of a place: the header, and what some operations add. Keeps the data aligned.
const HEAD: usize = 64;
/// A number of this rank's own, in operations that have one.
const NUMBER: Range<usize> = Header::SIZE..Header::SIZE + size_of::<u64>();
/// Parts of a place begin at multiples of a cache line.
pub(super) const LINE: usize = 64;

/// Bytes up to which everybody reads everything, in one step, rather than chunks and then sums, in two: reading costs
/// `(N - 1) n` instead of `2 n (N - 1) / N`, a step costs what some KiB cost.
fn whole(members: usize) -> usize {
    (16 << 10) / members.max(1)
}

/// One operation in progress on the region. Members stand in the order of their ranks.
pub(super) struct Shared<'a> {
    pub(super) region: &'a mut SharedRegion,
    pub(super) header: Header,
    pub(super) deadline: Deadline,
}

impl Shared<'_> {
    fn members(&self) -> usize {
        self.region.members().len()
    }

    fn me(&self) -> usize {
        self.region.position()
    }

    /// Bytes of data that one place takes in a step.
    pub(super) fn room(&self) -> usize {
        self.region.slot_bytes() - HEAD
    }

    /// A step in which this rank writes what `write` puts behind the head of its place.
    pub(super) fn write(&mut self, write: impl FnOnce(&mut [u8])) -> Result<()> {
        let mut access = self.region.wait_for_step(&self.header, self.deadline)?;
        write(&mut access.own_slot()[HEAD..]);
        access.publish();
        Ok(())
    }

    /// Reads what all have written in the last step.
    pub(super) fn read<T>(&mut self, read: impl FnOnce(Data<'_>) -> T) -> Result<T> {
        let mut access = self.region.wait_for_step(&self.header, self.deadline)?;
        Ok(read(Data(access.slots().0)))
    }

    /// Reads what all have written in the last step and writes for the next one.
    pub(super) fn read_and_write<T>(
        &mut self,
        run: impl FnOnce(Data<'_>, &mut [u8]) -> Result<T>,
    ) -> Result<T> {
        let mut access = self.region.wait_for_step(&self.header, self.deadline)?;
        let (theirs, mine) = access.slots();
        let value = run(Data(theirs), &mut mine[HEAD..])?;
        access.publish();
        Ok(value)
    }

    /// The first step of an operation: header, a number of this rank's own, and data.
    pub(super) fn begin(&mut self, number: u64, write: impl FnOnce(&mut [u8])) -> Result<()> {
        let mut access = self.region.wait_for_step(&self.header, self.deadline)?;
        let (head, data) = access.own_slot().split_at_mut(HEAD);
        head[..Header::SIZE].copy_from_slice(bytemuck::bytes_of(&self.header));
        head[NUMBER].copy_from_slice(&number.to_ne_bytes());
        write(data);
        access.publish();
        // Compared before a byte of anybody's data is used.
        let mine = self.header;
        let members = self.members();
        let other = {
            let mut access = self.region.wait_for_step(&self.header, self.deadline)?;
            let theirs = access.slots().0;
            (0..members).find_map(|member| {
                let header: Header = bytemuck::pod_read_unaligned(&theirs.of(member)[..Header::SIZE]);
                (header != mine).then_some((member, header))
            })
        };
        let Some((other, got)) = other else { return Ok(()) };
        let (me, peer) = (self.rank_of(self.me()), self.rank_of(other));
        Err(self.region.fail(mine.mismatch(me, peer, &got)))
    }

    /// Whether all members are in the same operation, and the numbers that they gave.
    ///
    /// # Errors
    /// `Mismatch` naming this rank's operation and the first other one.
    pub(super) fn agree(&mut self, number: u64) -> Result<Vec<u64>> {
        self.begin(number, |_| ())?;
        self.numbers()
    }

    /// The numbers of all members in the step that [`begin`](Self::begin) has ended.
    fn numbers(&mut self) -> Result<Vec<u64>> {
        let members = self.members();
        self.read(|theirs| (0..members).map(|member| theirs.number(member)).collect())
    }

    pub(super) fn all_reduce(
        &mut self,
        dtype: DType,
        op: ReduceOp,
        data: &mut Segments<'_, '_>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        if data.len() <= whole(self.members()).min(self.room()) {
            return self.reduce_whole(dtype, op, data, scratch);
        }
        let (members, me) = (self.members(), self.me());
        let stride = part(self.room(), members - 1);
        // Whole cache lines, because loops over data that straddles them take up to twice as long.
        let bytes = data.len();
        let lines = bytes.div_ceil(LINE);
        let blocks = lines.div_ceil(members * (stride / LINE)).max(1);
        for block in 0..blocks {
            let block = chunk(lines, blocks, block);
            let range = |member: usize| {
                let part = chunk(block.len(), members, member);
                let byte = |line: usize| bytes.min((block.start + line) * LINE);
                byte(part.start)..byte(part.end)
            };
            let pieces = |mine: &mut [u8]| {
                for member in (0..members).filter(|member| *member != me) {
                    let piece = range(member);
                    data.copy_out(piece.clone(), &mut mine[slot(me, member) * stride..][..piece.len()]);
                }
            };
            match block.start {
                0 => self.begin(0, pieces)?,
                _ => self.write(pieces)?,
            }
            self.read_and_write(|theirs, mine| {
                let mut done = 0;
                for own in data.pieces_mut(range(me)) {
                    let part = done..done + own.len();
                    let others: Vec<&[u8]> = (0..members)
                        .filter(|member| *member != me)
                        .map(|member| &theirs.of(member)[slot(member, me) * stride..][part.clone()])
                        .collect();
                    reduce_in_place_and(op, dtype, me, &others, own, &mut mine[part])?;
                    done += own.len();
                }
                Ok(())
            })?;
            self.read(|theirs| {
                for member in (0..members).filter(|member| *member != me) {
                    let piece = range(member);
                    data.copy_in(piece.start, &theirs.of(member)[..piece.len()]);
                }
            })?;
        }
        Ok(())
    }

    /// Everybody's data to everybody, and the same sum taken by all: a step less.
    fn reduce_whole(
        &mut self,
        dtype: DType,
        op: ReduceOp,
        data: &mut Segments<'_, '_>,
        scratch: &mut Scratch,
    ) -> Result<()> {
        let (bytes, me, members) = (data.len(), self.me(), self.members());
        self.begin(0, |mine| data.copy_out(0..bytes, &mut mine[..bytes]))?;
        self.read(|theirs| {
            let others: Vec<&[u8]> = (0..members)
                .filter(|member| *member != me)
                .map(|member| &theirs.of(member)[..bytes])
                .collect();
            // A list is summed in one piece of memory: it is small, and a pass for each segment is not cheaper.
            let mut pieces = data.pieces_mut(0..bytes);
            match (pieces.next(), pieces.next()) {
                (None, _) => Ok(()),
                (Some(only), None) => reduce_in_place(op, dtype, me, &others, only),
                _ => {
                    drop(pieces);
                    let mut room = scratch.pieces(1, bytes);
                    let sum = &mut *room[0];
                    data.copy_out(0..bytes, sum);
                    reduce_in_place(op, dtype, me, &others, sum)?;
                    data.copy_in(0, sum);
                    Ok(())
                }
            }
        })?
    }

    /// `output` is this rank's chunk of the reduction of all ranks' `input`.
    pub(super) fn reduce_scatter(
        &mut self,
        dtype: DType,
        op: ReduceOp,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<()> {
        let (size, members, me) = (dtype.size(), self.members(), self.me());
        let count = input.len() / size;
        let stride = part(self.room(), members - 1);
        let blocks = chunk(count, members, 0).len().div_ceil(stride / size).max(1);
        for block in 0..blocks {
            let range = |member: usize| {
                let whole = chunk(count, members, member);
                let part = chunk(whole.len(), blocks, block);
                (whole.start + part.start) * size..(whole.start + part.end) * size
            };
            let pieces = |mine: &mut [u8]| {
                for member in (0..members).filter(|member| *member != me) {
                    let piece = &input[range(member)];
                    mine[slot(me, member) * stride..][..piece.len()].copy_from_slice(piece);
                }
            };
            match block {
                0 => self.begin(0, pieces)?,
                _ => self.write(pieces)?,
            }
            self.read(|theirs| {
                let own = range(me);
                let start = chunk(count, members, me).start * size;
                let into = &mut output[own.start - start..own.end - start];
                into.copy_from_slice(&input[own.clone()]);
                let others: Vec<&[u8]> = (0..members)
                    .filter(|member| *member != me)
                    .map(|member| &theirs.of(member)[slot(member, me) * stride..][..own.len()])
                    .collect();
                reduce_in_place(op, dtype, me, &others, into)
            })??;
        }
        Ok(())
    }

    /// Everybody ends with `root`'s data; `root` is a position among the members.
    pub(super) fn broadcast(&mut self, root: usize, data: &mut Segments<'_, '_>) -> Result<()> {
        let (bytes, room, me) = (data.len(), self.room(), self.me());
        for start in (0..bytes.max(1)).step_by(room) {
            let block = start..bytes.min(start + room);
            let own = |mine: &mut [u8]| {
                if me == root {
                    data.copy_out(block.clone(), &mut mine[..block.len()]);
                }
            };
            match start {
                0 => self.begin(0, own)?,
                _ => self.write(own)?,
            }
            self.read(|theirs| {
                if me != root {
                    data.copy_in(block.start, &theirs.of(root)[..block.len()]);
                }
            })?;
        }
        Ok(())
    }

    /// Everybody's `input`, equally long on all ranks, to everybody.
    pub(super) fn all_gather(&mut self, input: &[u8], output: &mut [u8]) -> Result<()> {
        let (members, room) = (self.members(), self.room());
        for start in (0..input.len().max(1)).step_by(room) {
            let block = start..input.len().min(start + room);
            let own = |mine: &mut [u8]| mine[..block.len()].copy_from_slice(&input[block.clone()]);
            match start {
                0 => self.begin(0, own)?,
                _ => self.write(own)?,
            }
            self.read(|theirs| {
                for member in 0..members {
                    let into = member * input.len() + block.start;
                    output[into..into + block.len()].copy_from_slice(&theirs.of(member)[..block.len()]);
                }
            })?;
        }
        Ok(())
    }

    /// The bytes of all ranks, of any lengths, to all of them, or to `root` only.
    pub(super) fn gather_bytes(&mut self, root: Option<usize>, input: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (members, room, me) = (self.members(), self.room(), self.me());
        let write = |mine: &mut [u8], start: usize| {
            let rest = &input[start.min(input.len())..];
            let now = rest.len().min(room);
            mine[..now].copy_from_slice(&rest[..now]);
        };
        self.begin(input.len() as u64, |mine| write(mine, 0))?;
        let lengths = self.numbers()?;
        let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
        let wanted = root.is_none_or(|root| root == me);
        let mut gathered: Vec<Vec<u8>> = match wanted {
            true => lengths
                .iter()
                .enumerate()
                .map(|(member, length)| self.reserve(member, *length))
                .collect::<Result<_>>()?,
            false => Vec::new(),
        };
        for start in (0..longest.max(1)).step_by(room) {
            if start > 0 {
                self.write(|mine| write(mine, start))?;
            }
            self.read(|theirs| {
                for (member, all) in gathered.iter_mut().enumerate() {
                    let now = (lengths[member] as usize).saturating_sub(start).min(room);
                    all.extend_from_slice(&theirs.of(member)[..now]);
                }
            })?;
        }
        debug_assert_eq!(gathered.len(), if wanted { members } else { 0 }, "one for each member");
        Ok(gathered)
    }

    /// Memory for what a member announced. The length is another process's word, so a failed allocation is an error and
    /// not the end of this process.
    fn reserve(&self, member: usize, length: u64) -> Result<Vec<u8>> {
        let mut room = Vec::new();
        let reserved = usize::try_from(length).map(|length| room.try_reserve_exact(length));
        match reserved {
            Ok(Ok(())) => Ok(room),
            _ => {
                let peer = self.region.members()[member];
                let text = format!("no memory for the {length} bytes that {peer} gives to {}", self.header);
                Err(self.region.fail(Error::new(ErrorKind::Io, text)))
            }
        }
    }

    pub(super) fn rank_of(&self, member: usize) -> Rank {
        self.region.members()[member]
    }
}

/// What the members have written behind the heads of their places.
#[derive(Clone, Copy)]
pub(super) struct Data<'a>(PublishedSlots<'a>);

impl<'a> Data<'a> {
    pub(super) fn of(self, member: usize) -> &'a [u8] {
        &self.0.of(member)[HEAD..]
    }

    fn number(self, member: usize) -> u64 {
        bytemuck::pod_read_unaligned(&self.0.of(member)[NUMBER])
    }
}

/// Where in the place of `writer` its data for `reader` stands: there is none for itself.
fn slot(writer: usize, reader: usize) -> usize {
    reader - usize::from(reader > writer)
}

/// Bytes of each of `parts` equal parts of `room` bytes, which begin at cache lines.
pub(super) fn part(room: usize, parts: usize) -> usize {
    room / parts.max(1) / LINE * LINE
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;
    use crate::shm::regions;
    use crate::transport::OpKind;
    use std::time::Duration;

    /// For Miri, which sees a place that is read while it is written; what the results must be is tested with more cases
    /// in `tests/sharing.rs`.
    #[test]
    fn no_place_is_read_while_it_is_written() {
        let counts: &[usize] = if cfg!(miri) { &[3, 2500] } else { &[3, 2500, 300_000] };
        std::thread::scope(|scope| {
            for mut region in regions(3) {
                scope.spawn(move || {
                    let mut scratch = Scratch::default();
                    for (sequence, &count) in counts.iter().chain(counts).enumerate() {
                        let header = Header::new(OpKind::AllReduce, sequence as u64, DType::F32, count);
                        let deadline = Deadline::after(Duration::from_secs(60));
                        let mut shared = Shared { region: &mut region, header, deadline };
                        let mut left = vec![1.0f32; count / 3];
                        let mut right = vec![shared.me() as f32; count - count / 3];
                        let parts: &mut [&mut [u8]] =
                            &mut [bytemuck::cast_slice_mut(&mut left), bytemuck::cast_slice_mut(&mut right)];
                        let mut data = Segments::new(parts);
                        shared.all_reduce(DType::F32, ReduceOp::Sum, &mut data, &mut scratch).unwrap();
                        assert!(left.iter().chain(&right).all(|sum| *sum == 3.0), "{count} elements");
                        let sizes = [0, 5, 100].map(|size| vec![7u8; size]);
                        let gathered = shared.gather_bytes(None, &sizes[shared.me()]).unwrap();
                        assert_eq!(gathered, sizes);
                        shared.agree(0).unwrap();
                    }
                });
            }
        });
    }
}
