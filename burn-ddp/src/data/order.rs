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
            0 => 0..0,
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
