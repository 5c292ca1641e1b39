//! Which algorithm of `all_reduce` takes the least time: a model, and nothing that is measured at run time.
//!
//! The choice must be the same on all ranks, so it depends on nothing but the number of ranks and what every header
//! says: the count and the type. `docs/algorithms.md` has the formulas, where the constants come from, and a table.

use super::tree::partial_size;
use crate::dtype::DType;

/// How an `all_reduce` gets its result; the bits are the same with all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Everybody sends everything to everybody, and each rank reduces it all: fewest turns, most bytes.
    Whole,
    /// Each rank owns a chunk, gets everybody's data for it, and gives the result to everybody.
    Direct,
    /// Pairs of ranks halve what they have, neighbours first, and then double it again: fewest turns without more
    /// bytes. For worlds that are powers of two.
    Halving,
}

impl Algorithm {
    /// All of them, in the order in which ties are decided.
    pub const ALL: [Algorithm; 3] = [Algorithm::Whole, Algorithm::Direct, Algorithm::Halving];

    /// Whether it is defined for this number of ranks.
    pub fn works_for(self, world_size: usize) -> bool {
        self != Algorithm::Halving || world_size.is_power_of_two()
    }
}

/// What a wire and a processor take, in nanoseconds.
struct Costs {
    /// From a message that leaves to a receiver that has woken up.
    turn: f64,
    /// What a message keeps its sender and its receiver from doing anything else.
    message: f64,
    /// A byte that a rank sends while it receives one.
    byte: f64,
    /// A byte of another rank's data that is combined.
    combined: f64,
}

/// Connections between hosts. Measured over the loopback device, see `docs/algorithms.md`.
const TCP: Costs = Costs { turn: 12_000.0, message: 6_000.0, byte: 0.8, combined: 0.15 };

impl Costs {
    /// Nanoseconds that an `all_reduce` of `count` elements lasts.
    fn of(&self, algorithm: Algorithm, world_size: usize, dtype: DType, count: usize) -> f64 {
        let (world, bytes) = (world_size as f64, (count * dtype.size()) as f64);
        let peers = world - 1.0;
        // What everybody keeps, sends on or combines when work is shared evenly.
        let shared = bytes * peers / world;
        let steps = world.log2();
        let widened = partial_size(dtype) as f64 / dtype.size() as f64;
        match algorithm {
            Algorithm::Whole => {
                self.turn + peers * self.message + peers * bytes * (self.byte + self.combined)
            }
            Algorithm::Direct => {
                2.0 * (self.turn + peers * self.message) + 2.0 * shared * self.byte + shared * self.combined
            }
            Algorithm::Halving => {
                // The first step sends half of the elements as they are; all others send partial results.
                let partials = bytes / 2.0 + (shared - bytes / 2.0) * widened;
                2.0 * steps * (self.turn + self.message)
                    + (partials + shared) * self.byte
                    + partials * self.combined
            }
        }
    }
}

/// The quickest for `count` elements in all.
pub(super) fn choose(world_size: usize, dtype: DType, count: usize) -> Algorithm {
    let possible = Algorithm::ALL.into_iter().filter(|algorithm| algorithm.works_for(world_size));
    let costs = possible.map(|algorithm| (algorithm, TCP.of(algorithm, world_size, dtype, count)));
    costs
        .min_by(|(_, left), (_, right)| left.total_cmp(right))
        .map_or(Algorithm::Direct, |(algorithm, _)| algorithm)
}
