//! Bits that do not depend on the number of processes: order of additions, seeds, and the checks of both.

use burn_ddp_comm::{DType, Error, Result};

use crate::bucket::{ParamRole, ParamSpec};
use crate::reducer::Order;
use crate::replica::ReplicaOptions;

/// The properties, besides its data, on which the bits of a training depend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reproducibility {
    /// Bits depend on the number of processes, and neither on bucket sizes nor on timing. Micro-steps of a rank are
    /// added as they come.
    #[default]
    FixedWorldSize,
    /// Bits do not even depend on the number of processes: 1, 2, 4, 8 .. ranks that train on the same micro-batches
    /// have the same parameters, losses and norms to the last bit. Rank `r` takes the micro-batches `r * A` to
    /// `r * A + A - 1` of each global batch, where `A` is [`ReplicaOptions::accumulation`].
    ///
    /// Micro-steps are added in the tree in which ranks are, everything in the types that travel and divided once. A
    /// parameter that is used in some micro-steps counts as zero in the others.
    ///
    /// Before each micro-step the backend's random stream is seeded, so that a micro-batch has the same dropout on
    /// every rank. The seed is `h(h(h(seed) ^ step) ^ micro)` with the optimizer step since the replica was made, the
    /// index of the micro-batch in the global batch, and the finalizer `h` of SplitMix64. It is set at the end of
    /// [`Replica::new`](crate::Replica::new), `no_sync`, `reduce` and `discard`: code that draws between one of these
    /// and the forward pass must do so on every rank and in every world alike. A resumed training should be given
    /// another seed, or it draws the numbers of its beginning.
    ///
    /// It needs a power of two of ranks; parameters of f32 or f64; collectives through host memory; `accumulation`,
    /// and exactly that many micro-steps in every window. The backend has to compute the same bits for a micro-batch
    /// in every process (`docs/concepts.md` names the known exceptions).
    ///
    /// It costs memory for up to log2(A) + 1 sets of gradients instead of two, the one being added among them.
    AnyWorldSize {
        /// Determines the seeds of all micro-steps; the same on all ranks.
        seed: u64,
    },
}

impl Reproducibility {
    /// The order in which a rank adds its micro-steps.
    pub(super) fn order(self, options: &ReplicaOptions) -> Order {
        match (self, options.accumulation) {
            (Self::AnyWorldSize { .. }, Some(micro_steps)) => Order::Tree(micro_steps),
            _ => Order::AsTheyCome,
        }
    }

    /// Refuses options and groups with which the promise cannot be kept.
    pub(super) fn check(
        self,
        options: &ReplicaOptions,
        world_size: usize,
        in_host_memory: bool,
    ) -> Result<()> {
        if self == Self::FixedWorldSize {
            return Ok(());
        }
        if options.accumulation.is_none() {
            return Err(Error::config(
                "Reproducibility::AnyWorldSize needs ReplicaOptions::accumulation: give the number of micro-steps \
                 of a window",
            ));
        }
        if !world_size.is_power_of_two() {
            let above = world_size.next_power_of_two();
            return Err(Error::config(format!(
                "Reproducibility::AnyWorldSize in a world of {world_size}: the number of processes has to be a \
                 power of two, the nearest are {} and {above}",
                above / 2
            )));
        }
        if world_size > 1 && !in_host_memory {
            return Err(Error::config(
                "Reproducibility::AnyWorldSize needs collectives through host memory: the group's communicator \
                 adds in an order of its own",
            ));
        }
        Ok(())
    }

    /// Refuses parameters of half precision, whose gradients travel as f32.
    pub(super) fn check_parameters(self, specs: &[ParamSpec]) -> Result<()> {
        let half = |spec: &&ParamSpec| {
            spec.role == ParamRole::Trained && matches!(spec.dtype, DType::F16 | DType::BF16)
        };
        match specs.iter().find(half) {
            Some(spec) if self != Self::FixedWorldSize => Err(Error::config(format!(
                "`{}` is {}: Reproducibility::AnyWorldSize trains parameters of f32 and f64",
                spec.path, spec.dtype
            ))),
            _ => Ok(()),
        }
    }
}

/// The seed of micro-batch `micro` of the global batch in optimizer step `step`.
pub(super) fn seed_of(seed: u64, step: u64, micro: u64) -> u64 {
    [step, micro].into_iter().fold(split_mix64(seed, 1), |seed, number| split_mix64(seed ^ number, 1))
}

/// The output `number` (from 1) of SplitMix64 started at `seed`: neighbouring arguments give unrelated outputs (Steele,
/// Lea, Flood 2014).
pub(crate) fn split_mix64(seed: u64, number: u64) -> u64 {
    let mixed = seed.wrapping_add(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANY: Reproducibility = Reproducibility::AnyWorldSize { seed: 1 };

    fn refused(options: ReplicaOptions, world_size: usize, host: bool) -> String {
        ANY.check(&options, world_size, host).map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn what_cannot_be_kept_is_refused_by_name() {
        let options = || ReplicaOptions::new().with_accumulation(4);
        for world_size in [1, 2, 4, 8, 64] {
            assert_eq!(refused(options(), world_size, true), "");
        }
        assert!(refused(options(), 3, true).contains("world of 3"));
        for (world_size, nearest) in [(3, "2 and 4"), (5, "4 and 8"), (7, "4 and 8"), (12, "8 and 16")] {
            assert!(refused(options(), world_size, true).ends_with(nearest), "{world_size}");
        }
        assert!(refused(ReplicaOptions::new(), 2, true).contains("accumulation"));
        assert!(refused(options(), 2, false).contains("host memory"));
        assert_eq!(refused(options(), 1, false), "");
        Reproducibility::FixedWorldSize.check(&ReplicaOptions::new(), 3, false).unwrap();
    }

    #[test]
    fn half_precision_is_refused_where_it_is_trained() {
        let spec = |role| ParamSpec { path: "head.weight".into(), shape: vec![2], dtype: DType::BF16, role };
        let error = ANY.check_parameters(&[spec(ParamRole::Frozen), spec(ParamRole::Trained)]).unwrap_err();
        assert!(error.to_string().contains("`head.weight` is bf16"), "{error}");
        ANY.check_parameters(&[spec(ParamRole::Frozen)]).unwrap();
        Reproducibility::FixedWorldSize.check_parameters(&[spec(ParamRole::Trained)]).unwrap();
    }

    #[test]
    fn seeds_do_not_repeat() {
        let mut seeds: Vec<u64> = (0..4)
            .flat_map(|seed| {
                (0..32).flat_map(move |step| (0..32).map(move |micro| seed_of(seed, step, micro)))
            })
            .collect();
        assert_eq!(seed_of(0, 0, 0), split_mix64(split_mix64(split_mix64(0, 1), 1), 1));
        assert_eq!(split_mix64(0, 1), 0xE220_A839_7B1D_CDAF, "the first number of SplitMix64 from 0");
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 4 * 32 * 32);
    }
}
