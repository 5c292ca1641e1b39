//! The algorithm of `all_reduce` that takes the least time, by a model; nothing is measured at run time.
//!
//! The choice must be the same on all ranks, so it depends on nothing but the number of ranks and what every header
//! says: the count and the type. `docs/algorithms.md` has the formulas, where the constants come from, and a table.

use super::chunk::block_count;
use crate::dtype::DType;
use crate::reduction::partial_size;

/// An algorithm of `all_reduce`; the bits are the same with all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Each rank sends everything to all others and reduces all of it: fewest rounds, most bytes.
    Whole,
    /// Each rank owns a chunk, gets the data of all ranks for it, and sends the result to all.
    Direct,
    /// Pairs of ranks halve what they have, neighbours first, and then double it again: few rounds without more bytes.
    /// For worlds that are powers of two.
    Halving,
}

impl Algorithm {
    /// All of them, in the order in which ties are decided.
    pub const ALL: [Algorithm; 3] = [Algorithm::Whole, Algorithm::Direct, Algorithm::Halving];

    /// True if it is defined for this number of ranks.
    pub fn works_for(self, world_size: usize) -> bool {
        self != Algorithm::Halving || world_size.is_power_of_two()
    }
}

/// Costs of a wire and a processor, in nanoseconds.
struct Costs {
    /// A frame, from the call that sends it to a receiver that has woken up.
    frame: f64,
    /// A byte that a rank sends while it receives one.
    byte: f64,
    /// A byte of another rank's data that is combined.
    combined: f64,
}

/// Sockets: a frame as measured over the loopback device, bytes as on a link of 10 Gbit/s. See `docs/algorithms.md`.
const SOCKETS: Costs = Costs { frame: 15_000.0, byte: 0.8, combined: 0.15 };

impl Costs {
    /// Nanoseconds that an `all_reduce` of `count` elements lasts.
    fn of(&self, algorithm: Algorithm, world_size: usize, dtype: DType, count: usize) -> f64 {
        let (world, bytes) = (world_size as f64, (count * dtype.size()) as f64);
        let (peers, steps) = (world - 1.0, world.log2());
        // Bytes that a rank sends where each element has one owner.
        let shared = bytes * peers / world;
        let wide = partial_size(dtype);
        let (frames, sent, combined) = match algorithm {
            Algorithm::Whole => (peers, bytes * peers, bytes * peers),
            Algorithm::Direct => {
                (peers * (block_count(count * dtype.size()) + 1) as f64, 2.0 * shared, shared)
            }
            Algorithm::Halving => {
                // The first step sends half of the elements as they are, the others partial results.
                let partials = bytes / 2.0 + (shared - bytes / 2.0) * (wide / dtype.size()) as f64;
                (2.0 * steps * block_count(count * wide) as f64, partials + shared, partials)
            }
        };
        frames * self.frame + sent * self.byte + combined * self.combined
    }
}

/// The fastest algorithm for `count` elements in all.
pub(super) fn choose(world_size: usize, dtype: DType, count: usize) -> Algorithm {
    let possible = Algorithm::ALL.into_iter().filter(|algorithm| algorithm.works_for(world_size));
    possible
        .map(|algorithm| (algorithm, SOCKETS.of(algorithm, world_size, dtype, count)))
        .min_by(|(_, left), (_, right)| left.total_cmp(right))
        .map_or(Algorithm::Direct, |(algorithm, _)| algorithm)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number of bytes, and the algorithm from there on.
    type Change = (usize, Algorithm);

    /// The points at which the choice changes.
    fn changes(world_size: usize, dtype: DType) -> Vec<Change> {
        let mut changes: Vec<Change> = Vec::new();
        // Steps of a quarter: an estimate is not more exact than that.
        for exponent in 0..28 {
            for quarter in 4..8 {
                let bytes = (quarter << exponent) / 4;
                let choice = choose(world_size, dtype, bytes / dtype.size());
                if changes.last().is_none_or(|(_, last)| *last != choice) {
                    changes.push((bytes, choice));
                }
            }
        }
        changes
    }

    #[test]
    fn the_choices_are_those_of_the_documentation() {
        use Algorithm::{Direct, Halving, Whole};
        const KIB: usize = 1 << 10;
        let expected: [(usize, DType, &[Change]); 7] = [
            (2, DType::F32, &[(1, Whole), (224 * KIB, Direct)]),
            (3, DType::F32, &[(1, Whole), (40 * KIB, Direct)]),
            (4, DType::F32, &[(1, Whole), (10 * KIB, Halving), (10240 * KIB, Direct)]),
            (4, DType::BF16, &[(1, Whole), (12 * KIB, Halving), (128 * KIB, Direct)]),
            (5, DType::F32, &[(1, Whole), (28 * KIB, Direct)]),
            (8, DType::F32, &[(1, Halving)]),
            (8, DType::BF16, &[(1, Halving), (384 * KIB, Direct)]),
        ];
        for (world_size, dtype, expected) in expected {
            assert_eq!(changes(world_size, dtype), expected, "{world_size} ranks, {dtype}");
        }
    }

    #[test]
    fn every_world_has_an_algorithm_for_every_type_and_size() {
        for world_size in 1..=33 {
            for dtype in DType::ALL {
                for count in [0, 1, 1000, 1 << 20, 1 << 30] {
                    assert!(choose(world_size, dtype, count).works_for(world_size));
                }
            }
        }
        // Bytes that are combined in eight are too many to be sent like that.
        assert_eq!(choose(8, DType::U8, 1 << 20), Algorithm::Direct);
    }
}
