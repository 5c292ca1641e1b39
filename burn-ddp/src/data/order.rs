//! Arithmetic of the items that a rank takes in each micro-step.
//!
//! ```text
//! draw       0 1 2 3 4 5 6 7 8 9 10     position in the epoch's order; the order maps it to an index in the data set
//! step       0         1         2      global batches of 5
//! rank 0     x x x     x x x     x      `positions`: 0 1 2 | 3 4 5 | 6, this rank's own items
//! rank 1           x x       x x
//! ```
//!
//! The order depends on seed and epoch only, and the world size only decides where each global batch is cut. The
//! shuffle is written out here because a library's permutation may change with its version.

use std::ops::Range;

use burn_ddp_comm::collective::chunk;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Treatment of the items that do not fill the last global batch (with accumulation: the last window).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    /// The items are a shorter global batch.
    Split,
    /// The items are left out of this epoch.
    Drop,
    /// The first items of the epoch's order fill the batch.
    Pad,
}

/// One rank's share of every epoch.
#[derive(Clone, Debug)]
pub(super) struct Share {
    /// Number of items of the data set.
    pub(super) items: usize,
    /// Number of items of a global batch.
    batch: usize,
    /// Number of items that all ranks take in an epoch.
    draws: usize,
    seed: Option<u64>,
    rank: usize,
    world: usize,
    /// Positions of this rank's own items that are used; fewer than all in a slice of a loader.
    used: Range<usize>,
}

impl Share {
    /// Creates the share of `rank`. `window` (batch times accumulation) is the number of items that `tail` keeps whole.
    pub(super) fn new(
        items: usize,
        batch: usize,
        window: usize,
        tail: Tail,
        seed: Option<u64>,
        (rank, world): (usize, usize),
    ) -> Self {
        let draws = match tail {
            Tail::Split => items,
            Tail::Drop => items / window * window,
            Tail::Pad => items.div_ceil(window).saturating_mul(window),
        };
        let mut share = Self { items, batch, draws, seed, rank, world, used: 0..0 };
        share.used = 0..share.all_own();
        share
    }

    /// Restricts the share to the positions `part`.
    pub(super) fn slice(&self, part: Range<usize>) -> Self {
        let at = |position: usize| self.used.start.saturating_add(position).min(self.used.end);
        Self { used: at(part.start)..at(part.end).max(at(part.start)), ..self.clone() }
    }

    /// Number of items that this rank takes in an epoch.
    pub(super) fn own(&self) -> usize {
        self.used.len()
    }

    fn all_own(&self) -> usize {
        let full = self.draws / self.batch;
        full * self.full_piece() + self.piece_of(self.draws % self.batch).len()
    }

    /// This rank's range of a global batch of `length` items.
    fn piece_of(&self, length: usize) -> Range<usize> {
        chunk(length, self.world, self.rank)
    }

    /// Number of this rank's items in a full global batch.
    fn full_piece(&self) -> usize {
        self.piece_of(self.batch).len()
    }

    /// Global batches in which this rank makes a batch; with `placeholders` all of them.
    pub(super) fn steps(&self, placeholders: bool) -> Range<usize> {
        match self.full_piece() {
            _ if placeholders => 0..self.draws.div_ceil(self.batch),
            _ if self.used.is_empty() => 0..0,
            full => self.used.start / full..self.used.end.div_ceil(full),
        }
    }

    /// Number of this rank's own items in the global batch `step`.
    pub(super) fn count(&self, step: usize) -> usize {
        self.positions(step).len()
    }

    /// Positions of this rank's own items in the global batch `step`.
    fn positions(&self, step: usize) -> Range<usize> {
        let start = step * self.full_piece();
        let end = start + self.full_piece();
        let start = start.clamp(self.used.start, self.used.end);
        start..end.clamp(start, self.used.end)
    }

    /// Computes the order of an epoch.
    pub(super) fn epoch(&self, epoch: usize) -> EpochOrder {
        EpochOrder { share: self.clone(), order: self.seed.map(|seed| permutation(self.items, seed, epoch)) }
    }
}

/// Order of the data set in one epoch, and one rank's share of it.
pub(super) struct EpochOrder {
    share: Share,
    order: Option<Vec<usize>>,
}

impl EpochOrder {
    /// Indices in the data set of this rank's items in the global batch `step`. If it has none, the first item of the
    /// global batch, for a placeholder.
    pub(super) fn indices(&self, step: usize) -> Vec<usize> {
        let share = &self.share;
        let first = step * share.batch;
        let length = share.batch.min(share.draws - first);
        let own = share.positions(step);
        if own.is_empty() {
            return vec![self.index(first)];
        }
        let start = first + share.piece_of(length).start + (own.start - step * share.full_piece());
        (start..start + own.len()).map(|draw| self.index(draw)).collect()
    }

    fn index(&self, draw: usize) -> usize {
        let position = draw % self.share.items;
        self.order.as_ref().map_or(position, |order| order[position])
    }
}

/// Shuffles `0..length` by seed and epoch.
fn permutation(length: usize, seed: u64, epoch: usize) -> Vec<usize> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&(epoch as u64).to_le_bytes());
    let mut random = ChaCha8Rng::from_seed(key);
    let mut order: Vec<usize> = (0..length).collect();
    for last in (1..length).rev() {
        order.swap(last, below(&mut random, last as u64 + 1) as usize);
    }
    order
}

/// Draws a number below `bound` with equal probabilities: values above the last multiple of `bound` are drawn again.
fn below(random: &mut ChaCha8Rng, bound: u64) -> u64 {
    let beyond = (u64::MAX % bound + 1) % bound;
    loop {
        let drawn = random.next_u64();
        if drawn <= u64::MAX - beyond {
            return drawn % bound;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(items: usize, batch: usize, tail: Tail, rank: usize, world: usize) -> Share {
        Share::new(items, batch, batch, tail, Some(1), (rank, world))
    }

    /// Global batches of an epoch: the items of all ranks in each step, in rank order.
    fn global(shares: &[Share], epoch: usize) -> Vec<Vec<usize>> {
        let steps = shares.iter().map(|share| share.steps(false).end).max().unwrap_or(0);
        let epochs: Vec<_> = shares.iter().map(|share| share.epoch(epoch)).collect();
        let own = |step: usize| {
            let has = shares.iter().zip(&epochs).filter(move |(share, _)| share.steps(false).contains(&step));
            has.flat_map(|(share, epoch)| {
                let indices = epoch.indices(step);
                assert_eq!(indices.len(), share.count(step));
                indices
            })
            .collect()
        };
        (0..steps).map(own).collect()
    }

    /// A change of these values changes the order of every run that is resumed. They were computed by another
    /// implementation of ChaCha8.
    #[test]
    fn the_shuffle_is_this_one() {
        assert_eq!(permutation(10, 42, 0), [2, 1, 4, 3, 7, 0, 5, 8, 6, 9]);
        assert_eq!(permutation(10, 42, 1), [2, 6, 1, 5, 4, 3, 0, 9, 8, 7]);
    }

    #[test]
    fn every_position_is_as_likely_as_any_other() {
        let mut counts = [[0; 4]; 4];
        for epoch in 0..4000 {
            for (position, item) in permutation(4, 7, epoch).into_iter().enumerate() {
                counts[position][item] += 1;
            }
        }
        assert!(counts.iter().flatten().all(|count| (850..1150).contains(count)), "{counts:?}");
    }

    #[test]
    fn every_world_size_has_the_global_batches_of_one() {
        for (items, batch) in [(11, 5), (16, 5), (21, 5), (21, 4), (3, 7), (50, 4), (8, 3), (1, 1)] {
            for tail in [Tail::Split, Tail::Drop, Tail::Pad] {
                for epoch in [0, 1, 9] {
                    let of = |world: usize| {
                        let shares = (0..world).map(|rank| share(items, batch, tail, rank, world));
                        global(&shares.collect::<Vec<_>>(), epoch)
                    };
                    let one = of(1);
                    let mut all = one.concat();
                    all.sort_unstable();
                    match tail {
                        Tail::Split => assert_eq!(all, (0..items).collect::<Vec<_>>()),
                        Tail::Drop => assert_eq!(all.len(), items / batch * batch),
                        Tail::Pad => assert_eq!(all.len(), items.div_ceil(batch) * batch),
                    }
                    for world in 2..=4 {
                        assert_eq!(of(world), one, "{items} items by {batch}, {tail:?}, {world} ranks");
                    }
                }
            }
        }
    }

    #[test]
    fn epochs_differ_and_repeat_with_the_seed() {
        let orders: Vec<_> = (0..3).map(|epoch| permutation(16, 1, epoch)).collect();
        assert!(orders[0] != orders[1] && orders[1] != orders[2] && orders[0] != orders[2]);
        assert_eq!(permutation(16, 1, 2), orders[2]);
        assert_ne!(permutation(16, 2, 2), orders[2]);
        let unshuffled = Share::new(5, 2, 2, Tail::Split, None, (0, 1)).epoch(3);
        assert_eq!(
            [unshuffled.indices(0), unshuffled.indices(1), unshuffled.indices(2)].concat(),
            [0, 1, 2, 3, 4]
        );
    }

    #[test]
    fn global_batches_are_split_as_evenly_as_it_goes() {
        // Items, batch, and for each rank the items of its batches.
        let table: &[(usize, usize, &[&[usize]])] = &[
            (11, 5, &[&[3, 3, 1], &[2, 2]]),
            (21, 4, &[&[2, 2, 2, 2, 2, 1], &[2, 2, 2, 2, 2]]),
            (12, 5, &[&[2, 2, 1], &[2, 2, 1], &[1, 1]]),
            (6, 4, &[&[1, 1], &[1, 1], &[1], &[1]]),
            (5, 2, &[&[1, 1, 1], &[1, 1], &[]]),
        ];
        for (items, batch, ranks) in table {
            for (rank, expected) in ranks.iter().enumerate() {
                let share = share(*items, *batch, Tail::Split, rank, ranks.len());
                let counts: Vec<_> = share.steps(false).map(|step| share.count(step)).collect();
                assert_eq!(counts, *expected, "{items} items by {batch}, rank {rank}");
                assert_eq!(share.own(), expected.iter().sum::<usize>());
            }
        }
    }

    #[test]
    fn whole_windows_are_dropped_or_filled() {
        for (tail, each) in [(Tail::Drop, 8), (Tail::Pad, 12)] {
            for rank in 0..2 {
                let share = Share::new(21, 4, 8, tail, Some(1), (rank, 2));
                assert_eq!((share.own(), share.steps(false).len()), (each, each / 2), "{tail:?}");
            }
        }
        let padded = Share::new(3, 4, 8, Tail::Pad, None, (0, 1)).epoch(0);
        assert_eq!([padded.indices(0), padded.indices(1)], [[0, 1, 2, 0], [1, 2, 0, 1]]);
    }

    #[test]
    fn a_rank_without_items_can_stand_in_with_the_first_of_the_batch() {
        let of = |rank| {
            let share = Share::new(11, 5, 5, Tail::Split, Some(1), (rank, 2));
            let epoch = share.epoch(0);
            share.steps(true).map(|step| (share.count(step), epoch.indices(step))).collect::<Vec<_>>()
        };
        let (first, second) = (of(0), of(1));
        assert_eq!((first.len(), second.len()), (3, 3));
        assert_eq!((first[2].0, second[2].0), (1, 0));
        assert_eq!(first[2].1, second[2].1);
    }

    #[test]
    fn slices_of_a_share_tile_it() {
        for rank in 0..2 {
            let share = share(21, 5, Tail::Split, rank, 2);
            let of = |share: &Share| {
                let epoch = share.epoch(4);
                let items: Vec<_> = share.steps(false).flat_map(|step| epoch.indices(step)).collect();
                assert_eq!(items.len(), share.own());
                items
            };
            for cut in 0..=share.own() {
                let parts = [share.slice(0..cut), share.slice(cut..usize::MAX)];
                assert_eq!([of(&parts[0]), of(&parts[1])].concat(), of(&share), "cut at {cut}");
                assert_eq!(of(&parts[1].slice(0..1)), of(&share.slice(cut..cut + 1)));
            }
        }
    }
}
