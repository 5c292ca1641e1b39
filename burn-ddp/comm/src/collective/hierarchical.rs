//! `all_reduce` of a group over several hosts: shared memory inside of a host, a wire between hosts.
//!
//! The first ranks of each host, as many as the smallest host has, are its *lanes*: lane l of a host answers for the
//! l-th chunk of the data, and exchanges frames with the lanes l of the other hosts only.
//!
//! ```text
//!             host 0: ranks 0 1                                          host 1: ranks 2 3
//! collect     shared memory: rank 0 gets chunk 0 of both, rank 1 chunk 1 the same with ranks 2 and 3
//! exchange    lanes 0 (ranks 0 and 2): partial results of chunk 0 ◀─ wire ─▶, completed, results ◀─ wire ─▶
//!             lanes 1 (ranks 1 and 3): the same for chunk 1
//! distribute  shared memory: every rank gets the results of both lanes
//! ```
//!
//! A lane sends not each rank's data but the partial results that the tree needs: one if the ranks of its host form a
//! subtree, so that the traffic of a host is that of one rank; otherwise one for each of the largest subtrees that they
//! do form. They travel in the type in which they are added up, so nothing is rounded in between, and the bits are
//! those of the tree over all ranks.
//!
//! A host whose ranks form a subtree sends `2 n (H - 1) / H` bytes of f32 over its lanes together, where `H` hosts
//! without shared memory would send that for each rank.

use std::ops::Range;

use super::chunk::chunk;
use super::scratch::Scratch;
use super::segments::Segments;
use super::shared::{CACHE_LINE, ShmExchange, stride};
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::rank::Rank;
use crate::reduction::{Node, complete, nodes_within, partial_size, reduce_node};
use crate::topology::host_of;
use crate::transport::exchange::Exchange;

/// Bytes of the data that go through at a time: enough for a frame that fills a link, few enough for a cache.
const BLOCK_BYTES: usize = 2 << 20;

/// The division of the ranks into hosts and lanes.
struct Lanes<'a> {
    hosts: &'a [Vec<Rank>],
    /// Index of this rank's host.
    host: usize,
    /// This rank's position in its host.
    position: usize,
    /// Number of lanes of each host.
    count: usize,
    /// The nodes of the tree that each host's ranks fill.
    nodes: Vec<Vec<Node>>,
}

impl<'a> Lanes<'a> {
    fn new(hosts: &'a [Vec<Rank>], me: Rank, world_size: usize) -> Self {
        let host = host_of(hosts, me);
        let count = hosts.iter().map(Vec::len).min().unwrap_or(1);
        let position = hosts[host].iter().position(|rank| *rank == me).unwrap_or(0);
        let ranks = |host: &Vec<Rank>| host.iter().map(|rank| rank.0).collect::<Vec<_>>();
        let nodes = hosts.iter().map(|host| nodes_within(world_size, &ranks(host))).collect();
        Self { hosts, host, position, count, nodes }
    }

    /// The lane that this rank is, if it is one.
    fn mine(&self) -> Option<usize> {
        (self.position < self.count).then_some(self.position)
    }
}

/// Replaces `data` by its reduction over all ranks.
pub(super) fn all_reduce(
    hosts: &[Vec<Rank>],
    mut local: Option<ShmExchange<'_>>,
    exchange: &mut Exchange<'_>,
    scratch: &mut Scratch,
    dtype: DType,
    op: ReduceOp,
    data: &mut Segments<'_, '_>,
) -> Result<()> {
    let lanes = Lanes::new(hosts, exchange.rank(), exchange.world_size());
    let count = data.len() / dtype.size();
    // A rank may hold the partial results of all nodes for each element.
    let nodes: usize = lanes.nodes.iter().map(Vec::len).sum();
    let blocks = (data.len() * nodes.div_ceil(lanes.hosts.len())).div_ceil(BLOCK_BYTES).max(1);
    for index in 0..blocks {
        let block = chunk(count, blocks, index);
        let part = |lane: usize| {
            let part = chunk(block.len(), lanes.count, lane);
            block.start + part.start..block.start + part.end
        };
        let block = Block { lanes: &lanes, dtype, op, part: &part, first: index == 0 };
        block.run(local.as_mut(), exchange, scratch, data)?;
    }
    Ok(())
}

/// The block of the data that is being reduced.
struct Block<'a> {
    lanes: &'a Lanes<'a>,
    dtype: DType,
    op: ReduceOp,
    /// Elements for which a lane answers.
    part: &'a dyn Fn(usize) -> Range<usize>,
    /// True if it is the first block of the operation, in which headers are compared.
    first: bool,
}

impl Block<'_> {
    fn run(
        &self,
        mut shared: Option<&mut ShmExchange<'_>>,
        exchange: &mut Exchange<'_>,
        scratch: &mut Scratch,
        data: &mut Segments<'_, '_>,
    ) -> Result<()> {
        let wide = partial_size(self.dtype);
        let lane = self.lanes.mine();
        let part = lane.map_or(0..0, self.part);
        let all_nodes: usize = self.lanes.nodes.iter().map(Vec::len).sum();
        let mine = self.lanes.nodes[self.lanes.host].len();
        let share = part.len().div_ceil(self.lanes.hosts.len());
        // Partial results of this host, those of all hosts for this rank's share (or the own data), and the result.
        let incoming = (all_nodes * share * wide).max(part.len() * wide);
        let sizes = [mine * part.len() * wide, incoming, part.len() * self.dtype.size()];
        let mut memory = scratch.pieces(1, sizes.iter().map(|size| size.next_multiple_of(CACHE_LINE)).sum());
        let mut rest: &mut [u8] = &mut *memory[0];
        let [partials, incoming, result] = sizes.map(|size| {
            let (piece, behind) = std::mem::take(&mut rest).split_at_mut(size.next_multiple_of(CACHE_LINE));
            rest = behind;
            &mut piece[..size]
        });
        match &mut shared {
            Some(shared) => self.collect(shared, data, partials, part.len())?,
            None => self.widen(data, &part, incoming, partials)?,
        }
        if lane.is_some() {
            self.exchange(exchange, partials, incoming, result, part.len())?;
        }
        match shared {
            Some(shared) => self.distribute(shared, data, result),
            None => {
                data.copy_in(part.start * self.dtype.size(), result);
                Ok(())
            }
        }
    }

    /// Number of steps in which the chunks go through shared memory, and the distance of two lanes' data in a slot.
    fn steps(&self, shared: &ShmExchange<'_>) -> (usize, usize) {
        let stride = stride(shared.data_bytes(), self.lanes.count);
        let longest = (self.part)(0).len() * self.dtype.size();
        (longest.div_ceil(stride / self.dtype.size() * self.dtype.size()).max(1), stride)
    }

    /// Bytes of `lane`'s chunk in a step, counted from the beginning of the data.
    fn range(&self, lane: usize, steps: usize, step: usize) -> Range<usize> {
        let (part, size) = ((self.part)(lane), self.dtype.size());
        let now = chunk(part.len(), steps, step);
        (part.start + now.start) * size..(part.start + now.end) * size
    }

    /// Leaves in `partials`, node after node, the partial results of this host for this rank's chunk of `count`
    /// elements.
    fn collect(
        &self,
        shared: &mut ShmExchange<'_>,
        data: &mut Segments<'_, '_>,
        partials: &mut [u8],
        count: usize,
    ) -> Result<()> {
        let (steps, stride) = self.steps(shared);
        let (size, wide) = (self.dtype.size(), partial_size(self.dtype));
        let host = &self.lanes.hosts[self.lanes.host];
        for step in 0..steps {
            let write = |mine: &mut [u8]| {
                for lane in 0..self.lanes.count {
                    let range = self.range(lane, steps, step);
                    data.copy_out(range.clone(), &mut mine[lane * stride..][..range.len()]);
                }
            };
            match step {
                0 if self.first => shared.begin(0, write)?,
                _ => shared.write(write)?,
            }
            shared.read(|theirs| {
                let Some(lane) = self.lanes.mine() else { return Ok(()) };
                let range = self.range(lane, steps, step);
                let before = (range.start / size - (self.part)(lane).start) * wide;
                let leaf = |rank: usize| {
                    let member = host.iter().position(|other| other.0 == rank).unwrap_or(0);
                    &theirs.of(member)[lane * stride..][..range.len()]
                };
                for (index, node) in self.lanes.nodes[self.lanes.host].iter().enumerate() {
                    let into = &mut partials[index * count * wide + before..][..range.len() / size * wide];
                    reduce_node(self.op, self.dtype, node.clone(), &leaf, into)?;
                }
                Ok(())
            })??;
        }
        Ok(())
    }

    /// Leaves in `partials` the partial results of a host of one rank.
    fn widen(
        &self,
        data: &Segments<'_, '_>,
        part: &Range<usize>,
        memory: &mut [u8],
        partials: &mut [u8],
    ) -> Result<()> {
        let size = self.dtype.size();
        let own = &mut memory[..part.len() * size];
        data.copy_out(part.start * size..part.end * size, own);
        for node in &self.lanes.nodes[self.lanes.host] {
            reduce_node(self.op, self.dtype, node.clone(), &|_| &*own, partials)?;
        }
        Ok(())
    }

    /// Exchanges partial results, and then results, with the same lane of all other hosts, for this lane's chunk of
    /// `count` elements.
    fn exchange(
        &self,
        exchange: &mut Exchange<'_>,
        partials: &[u8],
        incoming: &mut [u8],
        result: &mut [u8],
        count: usize,
    ) -> Result<()> {
        let (size, wide) = (self.dtype.size(), partial_size(self.dtype));
        let hosts = self.lanes.hosts.len();
        let share = |host: usize| chunk(count, hosts, host);
        let mine = share(self.lanes.host);
        let nodes = |host: usize| self.lanes.nodes[host].len();
        // Offset of a host's partial results in `incoming`.
        let at = |host: usize| (0..host).map(nodes).sum::<usize>() * mine.len() * wide;
        for (to, from) in self.rounds() {
            let theirs = share(to);
            let body: Vec<&[u8]> = (0..nodes(self.lanes.host))
                .map(|node| {
                    let start = (node * count + theirs.start) * wide;
                    &partials[start..start + theirs.len() * wide]
                })
                .collect();
            let into = &mut incoming[at(from)..at(from + 1)];
            exchange.swap(0, self.peers(to, from), &body, &mut [into])?;
        }
        let mut all: Vec<(Node, &[u8])> = Vec::new();
        for (host, of_host) in self.lanes.nodes.iter().enumerate() {
            for (index, node) in of_host.iter().enumerate() {
                let bytes = match host == self.lanes.host {
                    true => &partials[(index * count + mine.start) * wide..][..mine.len() * wide],
                    false => &incoming[at(host) + index * mine.len() * wide..][..mine.len() * wide],
                };
                all.push((node.clone(), bytes));
            }
        }
        all.sort_by_key(|(node, _)| node.start);
        let own = &mut result[mine.start * size..mine.end * size];
        complete(self.op, self.dtype, exchange.world_size(), &all, own)?;
        for (to, from) in self.rounds() {
            let theirs = share(from);
            let (before, rest) = result.split_at_mut(mine.start * size);
            let (own, after) = rest.split_at_mut(mine.len() * size);
            let into = match from < self.lanes.host {
                true => &mut before[theirs.start * size..theirs.end * size],
                false => &mut after[(theirs.start - mine.end) * size..(theirs.end - mine.end) * size],
            };
            exchange.swap(1, self.peers(to, from), &[&*own], &mut [into])?;
        }
        Ok(())
    }

    /// For each round, the host to send to and the one to receive from.
    fn rounds(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (host, hosts) = (self.lanes.host, self.lanes.hosts.len());
        (1..hosts).map(move |step| ((host + step) % hosts, (host + hosts - step) % hosts))
    }

    fn peers(&self, to: usize, from: usize) -> (Rank, Rank) {
        let lane = self.lanes.position;
        (self.lanes.hosts[to][lane], self.lanes.hosts[from][lane])
    }

    /// Brings the results of all lanes to all ranks of this host.
    fn distribute(
        &self,
        shared: &mut ShmExchange<'_>,
        data: &mut Segments<'_, '_>,
        result: &[u8],
    ) -> Result<()> {
        let (steps, _) = self.steps(shared);
        let size = self.dtype.size();
        for step in 0..steps {
            shared.write(|mine| {
                let Some(lane) = self.lanes.mine() else { return };
                let range = self.range(lane, steps, step);
                let start = range.start - (self.part)(lane).start * size;
                mine[..range.len()].copy_from_slice(&result[start..start + range.len()]);
            })?;
            shared.read(|theirs| {
                for lane in 0..self.lanes.count {
                    let range = self.range(lane, steps, step);
                    data.copy_in(range.start, &theirs.of(lane)[..range.len()]);
                }
            })?;
        }
        Ok(())
    }
}
