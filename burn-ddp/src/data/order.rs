//! Which rank draws which item in which micro-step: arithmetic alone.
//!
//! The order of an epoch is that of the whole data set and depends on seed and epoch only; the world size decides
//! no more than where each global batch is cut. That is what makes N processes see the global batches of one, and
//! it is why the shuffle is written out here: a permutation that came from a library would change with its version.

use std::ops::Range;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::collective::chunk;

/// What happens to items that do not fill the last global batch (with accumulation: the last window).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    /// They are a shorter global batch.
    Split,
    /// They are left out of this epoch.
    Drop,
    /// Items from the front of the epoch's order fill it up.
    Pad,
}

/// One rank's part of every epoch.
#[derive(Clone, Debug)]
pub(super) struct Share {
    /// Length of the data set.
    pub(super) items: usize,
    /// Items of a global batch.
    batch: usize,
    /// Items that all ranks draw in an epoch.
    draws: usize,
    seed: Option<u64>,
    rank: usize,
    world: usize,
    /// The part of this rank's own items that is used, counted in its order; for slices of a loader.
    used: Range<usize>,
}

impl Share {
    /// `window` is the number of items that the tail policies complete or leave out: batch times accumulation.
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

    /// The items `part` of this share, counted in this rank's order.
    pub(super) fn slice(&self, part: Range<usize>) -> Self {
        let at = |position: usize| self.used.start.saturating_add(position).min(self.used.end);
        Self { used: at(part.start)..at(part.end).max(at(part.start)), ..self.clone() }
    }

    /// Items that this rank draws in an epoch.
    pub(super) fn own(&self) -> usize {
        self.used.len()
    }

    fn all_own(&self) -> usize {
        let full = self.draws / self.batch;
        full * self.full_piece() + self.piece_of(self.draws % self.batch).len()
    }

    /// This rank's part of a global batch of `length` items.
    fn piece_of(&self, length: usize) -> Range<usize> {
        chunk(length, self.world, self.rank)
    }

    fn full_piece(&self) -> usize {
        self.piece_of(self.batch).len()
    }

    /// The global batches in which this rank makes a batch; with `placeholders` all of them.
    pub(super) fn steps(&self, placeholders: bool) -> Range<usize> {
        match self.full_piece() {
            _ if placeholders => 0..self.draws.div_ceil(self.batch),
            _ if self.used.is_empty() => 0..0,
            full => self.used.start / full..self.used.end.div_ceil(full),
        }
    }

    /// How many of this rank's own items the global batch `step` holds.
    pub(super) fn count(&self, step: usize) -> usize {
        self.positions(step).len()
    }

    fn positions(&self, step: usize) -> Range<usize> {
        let start = step * self.full_piece();
        let end = start + self.full_piece();
        let start = start.clamp(self.used.start, self.used.end);
        start..end.clamp(start, self.used.end)
    }

    /// The order of an epoch.
    pub(super) fn epoch(&self, epoch: usize) -> Epoch {
        Epoch { share: self.clone(), order: self.seed.map(|seed| permutation(self.items, seed, epoch)) }
    }
}

/// One rank's items in one epoch.
pub(super) struct Epoch {
    share: Share,
    order: Option<Vec<usize>>,
}

impl Epoch {
    /// Indices in the data set of what this rank makes a batch of in the global batch `step`. Where it has no item
    /// of its own this is the first of the global batch, for a placeholder.
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

/// `0..length` shuffled by seed and epoch.
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

/// A number below `bound`, each as likely as any other: draws above the last multiple of `bound` are repeated.
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

    /// The global batches of an epoch: what all ranks hold of each step, in rank order.
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

    /// A change here changes the order of every run that is resumed. The values are those of another
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
