//! The collectives of ranks that share one host's memory.
//!
//! Everything happens in steps of the [`SharedRegion`]: all members write their own slots, publish, and read. Sums are
//! taken straight out of the slots of the others and this rank's own segments. Large data goes through in blocks, so
//! that what one rank has written is still in a cache when the others read it:
//!
//! ```text
//! all_reduce, 3 ranks     rank 0's slot            rank 1's slot            rank 2's slot
//! step 1, write           its chunks 1 and 2       its chunks 0 and 2       its chunks 0 and 1
//! step 2, sum and write   sum of chunk 0           sum of chunk 1           sum of chunk 2
//! read                    each rank copies the sums of the others
//! ```
//!
//! All ranks take the same number of steps for the same operation, count and lengths. The first step of each operation
//! brings every rank's header to all members, which compare them before they use a byte of data.

use std::ops::Range;

use super::chunk::chunk;
use super::scratch::Scratch;
use super::segments::Segments;
use super::wire::peer_index;
use crate::deadline::Deadline;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, ErrorKind, Result};
use crate::rank::Rank;
use crate::reduction::{reduce_in_place, reduce_in_place_and};
use crate::shm::{PublishedSlots, SharedRegion};
use crate::transport::Header;

/// Bytes in front of the data of a slot: the header, and a number in some operations. Keeps the data aligned.
const PREFIX: usize = 64;
/// Range of a number of this rank's own, in operations that have one.
const NUMBER: Range<usize> = Header::SIZE..Header::SIZE + size_of::<u64>();
/// Parts of a slot begin at multiples of a cache line.
pub(super) const CACHE_LINE: usize = 64;

/// Most bytes that all ranks read whole, in one step, rather than chunks and then sums, in two steps: reading costs
/// `(N - 1) n` instead of `2 n (N - 1) / N`, and a step costs as much as some KiB.
fn whole_limit(members: usize) -> usize {
    (16 << 10) / members.max(1)
}

/// One operation in progress in shared memory. Members stand in the order of their ranks.
pub(super) struct ShmExchange<'a> {
    pub(super) region: &'a mut SharedRegion,
    pub(super) header: Header,
    pub(super) deadline: Deadline,
}

impl ShmExchange<'_> {
    fn members(&self) -> usize {
        self.region.members().len()
    }

    fn me(&self) -> usize {
        self.region.position()
    }

    /// Bytes of data that a slot takes in a step.
    pub(super) fn data_bytes(&self) -> usize {
        self.region.slot_bytes() - PREFIX
    }

    /// Takes a step in which `write` fills the data of this rank's slot.
    pub(super) fn write(&mut self, write: impl FnOnce(&mut [u8])) -> Result<()> {
        let mut access = self.region.wait_for_step(&self.header, self.deadline)?;
        write(&mut access.own_slot()[PREFIX..]);
        access.publish();
        Ok(())
    }

    /// Reads the data that all members have written in the last step.
    pub(super) fn read<T>(&mut self, read: impl FnOnce(SlotData<'_>) -> T) -> Result<T> {
        let mut access = self.region.wait_for_step(&self.header, self.deadline)?;
        Ok(read(SlotData(access.slots().0)))
    }

    /// Reads what all members have written in the last step, and writes for the next one.
    pub(super) fn read_and_write<T>(
        &mut self,
        run: impl FnOnce(SlotData<'_>, &mut [u8]) -> Result<T>,
    ) -> Result<T> {
        let mut access = self.region.wait_for_step(&self.header, self.deadline)?;
        let (theirs, mine) = access.slots();
        let value = run(SlotData(theirs), &mut mine[PREFIX..])?;
        access.publish();
        Ok(value)
    }

    /// Takes the first step of an operation, with header, a number of this rank's own, and data, and compares headers.
    ///
    /// # Errors
    /// `Mismatch` naming this rank's operation and the first other one.
    pub(super) fn begin(&mut self, number: u64, write: impl FnOnce(&mut [u8])) -> Result<()> {
        let mut access = self.region.wait_for_step(&self.header, self.deadline)?;
        let (head, data) = access.own_slot().split_at_mut(PREFIX);
        head[..Header::SIZE].copy_from_slice(bytemuck::bytes_of(&self.header));
        head[NUMBER].copy_from_slice(&number.to_ne_bytes());
        write(data);
        access.publish();
        // Headers are compared before a byte of data is used.
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

    /// Checks that all members are in the same operation; returns the numbers that they gave.
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
        if data.len() <= whole_limit(self.members()).min(self.data_bytes()) {
            return self.reduce_whole(dtype, op, data, scratch);
        }
        let (members, me) = (self.members(), self.me());
        let stride = stride(self.data_bytes(), members - 1);
        // Whole cache lines, because loops over data that straddles them take up to twice as long.
        let bytes = data.len();
        let lines = bytes.div_ceil(CACHE_LINE);
        let blocks = lines.div_ceil(members * (stride / CACHE_LINE)).max(1);
        for block in 0..blocks {
            let block = chunk(lines, blocks, block);
            let range = |member: usize| {
                let part = chunk(block.len(), members, member);
                let byte = |line: usize| bytes.min((block.start + line) * CACHE_LINE);
                byte(part.start)..byte(part.end)
            };
            let pieces = |mine: &mut [u8]| {
                for member in (0..members).filter(|member| *member != me) {
                    let piece = range(member);
                    data.copy_out(piece.clone(), &mut mine[peer_index(me, member) * stride..][..piece.len()]);
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
                        .map(|member| &theirs.of(member)[peer_index(member, me) * stride..][part.clone()])
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

    /// All ranks read all data and take the same sum: one step less.
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
            // A list is summed in one piece of memory: it is small, and one pass for each segment is not cheaper.
            let mut pieces = data.pieces_mut(0..bytes);
            match (pieces.next(), pieces.next()) {
                (None, _) => Ok(()),
                (Some(only), None) => reduce_in_place(op, dtype, me, &others, only),
                _ => {
                    drop(pieces);
                    let mut memory = scratch.pieces(1, bytes);
                    let sum = &mut *memory[0];
                    data.copy_out(0..bytes, sum);
                    reduce_in_place(op, dtype, me, &others, sum)?;
                    data.copy_in(0, sum);
                    Ok(())
                }
            }
        })?
    }

    /// Fills `output` with this rank's chunk of the reduction of all ranks' `input`.
    pub(super) fn reduce_scatter(
        &mut self,
        dtype: DType,
        op: ReduceOp,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<()> {
        let (size, members, me) = (dtype.size(), self.members(), self.me());
        let count = input.len() / size;
        let stride = stride(self.data_bytes(), members - 1);
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
                    mine[peer_index(me, member) * stride..][..piece.len()].copy_from_slice(piece);
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
                    .map(|member| &theirs.of(member)[peer_index(member, me) * stride..][..own.len()])
                    .collect();
                reduce_in_place(op, dtype, me, &others, into)
            })??;
        }
        Ok(())
    }

    /// Replaces `data` by that of the member at position `root`.
    pub(super) fn broadcast(&mut self, root: usize, data: &mut Segments<'_, '_>) -> Result<()> {
        let (bytes, capacity, me) = (data.len(), self.data_bytes(), self.me());
        for start in (0..bytes.max(1)).step_by(capacity) {
            let block = start..bytes.min(start + capacity);
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

    /// Fills `output` with all ranks' `input`, equally long on all of them.
    pub(super) fn all_gather(&mut self, input: &[u8], output: &mut [u8]) -> Result<()> {
        let (members, capacity) = (self.members(), self.data_bytes());
        for start in (0..input.len().max(1)).step_by(capacity) {
            let block = start..input.len().min(start + capacity);
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

    /// All ranks' `input`, of any lengths, on all of them or on `root` only.
    pub(super) fn gather_bytes(&mut self, root: Option<usize>, input: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (members, capacity, me) = (self.members(), self.data_bytes(), self.me());
        let write = |mine: &mut [u8], start: usize| {
            let rest = &input[start.min(input.len())..];
            let now = rest.len().min(capacity);
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
        for start in (0..longest.max(1)).step_by(capacity) {
            if start > 0 {
                self.write(|mine| write(mine, start))?;
            }
            self.read(|theirs| {
                for (member, all) in gathered.iter_mut().enumerate() {
                    let now = (lengths[member] as usize).saturating_sub(start).min(capacity);
                    all.extend_from_slice(&theirs.of(member)[..now]);
                }
            })?;
        }
        debug_assert_eq!(gathered.len(), if wanted { members } else { 0 }, "one for each member");
        Ok(gathered)
    }

    /// Allocates memory for what a member announced. The length comes from another process, so a failed allocation is
    /// an error and does not end this process.
    fn reserve(&self, member: usize, length: u64) -> Result<Vec<u8>> {
        let mut memory = Vec::new();
        let reserved = usize::try_from(length).map(|length| memory.try_reserve_exact(length));
        match reserved {
            Ok(Ok(())) => Ok(memory),
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

/// The data of all members' slots.
#[derive(Clone, Copy)]
pub(super) struct SlotData<'a>(PublishedSlots<'a>);

impl<'a> SlotData<'a> {
    pub(super) fn of(self, member: usize) -> &'a [u8] {
        &self.0.of(member)[PREFIX..]
    }

    fn number(self, member: usize) -> u64 {
        bytemuck::pod_read_unaligned(&self.0.of(member)[NUMBER])
    }
}

/// Distance of `parts` equal parts of `bytes` bytes, which begin at cache lines.
pub(super) fn stride(bytes: usize, parts: usize) -> usize {
    bytes / parts.max(1) / CACHE_LINE * CACHE_LINE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operation::Operation;
    use crate::shm::regions;
    use std::time::Duration;

    /// For Miri, which sees a slot that is read while it is written; `tests/sharing.rs` tests the results with more
    /// cases.
    #[test]
    fn no_slot_is_read_while_it_is_written() {
        let counts: &[usize] = if cfg!(miri) { &[3, 2500] } else { &[3, 2500, 300_000] };
        std::thread::scope(|scope| {
            for mut region in regions(3) {
                scope.spawn(move || {
                    let mut scratch = Scratch::default();
                    for (sequence, &count) in counts.iter().chain(counts).enumerate() {
                        let header = Header::new(
                            Operation::AllReduce(ReduceOp::Sum),
                            sequence as u64,
                            DType::F32,
                            count,
                        );
                        let deadline = Deadline::after(Duration::from_secs(60));
                        let mut shared = ShmExchange { region: &mut region, header, deadline };
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
