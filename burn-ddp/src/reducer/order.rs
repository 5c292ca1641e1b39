//! The order in which a rank adds its micro-steps.
//!
//! The tree over ranks that the collectives use splits in the middle, so with 2^k ranks it is the top of the tree
//! over all micro-steps of all ranks. A rank that adds its own in the lower part of that tree makes the whole the
//! same for every such number of ranks. The shape of the tree is known before the first leaf, so leaves can be added as
//! they come: only the sums of left branches are pending, at most one for each time the number of leaves can be halved.

use burn::tensor::FloatDType;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_backend::TensorMetadata;

use burn_ddp_comm::reduction::pairwise;
use burn_ddp_comm::{DType, Error, Result};

/// The order of one rank's micro-steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// One after the other, however many come; numbers beside the gradients in f64.
    AsTheyCome,
    /// The tree of [`pairwise`] over exactly this number, all in the types that travel. An absent gradient counts as
    /// zeros, because a rank sends zeros for it.
    Tree(usize),
}

impl Order {
    /// Refuses a window of `given` micro-steps unless it `fits` the number that the order needs, if it needs one.
    ///
    /// # Errors
    /// Both numbers.
    pub(super) fn check(self, given: usize, fits: impl Fn(usize, usize) -> bool) -> Result<()> {
        match self {
            Self::Tree(expected) if !fits(given, expected) => Err(Error::config(format!(
                "a window of {given} micro-steps{}, but accumulation is {expected}: with \
                 Reproducibility::AnyWorldSize every window has exactly that many, on all ranks",
                if given < expected { "" } else { " or more" }
            ))),
            _ => Ok(()),
        }
    }

    /// Number of pending sums that micro-step `number` (from 0) of a window completes.
    pub(super) fn joins(self, number: usize) -> usize {
        let Self::Tree(mut leaves) = self else { return usize::from(number > 0) };
        // A leaf completes one branch for each step to the right at the end of its path from the root.
        let (mut leaf, mut rights) = (number, 0);
        while leaves > 1 {
            let left = leaves.div_ceil(2);
            if leaf < left {
                (leaves, rights) = (left, 0);
            } else {
                (leaves, leaf, rights) = (leaves - left, leaf - left, rights + 1);
            }
        }
        rights
    }

    /// The sum of two neighbours, either of which may be absent.
    pub(super) fn join<B: Backend>(
        self,
        left: Option<FloatTensor<B>>,
        right: Option<FloatTensor<B>>,
    ) -> Option<FloatTensor<B>> {
        match (left, right) {
            (Some(left), Some(right)) => Some(B::float_add(left, right)),
            // Adding zeros matters: -0.0 + 0.0 is 0.0.
            (Some(one), None) | (None, Some(one)) if self != Self::AsTheyCome => {
                let dtype =
                    if one.dtype() == burn::tensor::DType::F64 { FloatDType::F64 } else { FloatDType::F32 };
                let zeros = B::float_zeros(one.shape(), &B::float_device(&one), dtype);
                Some(B::float_add(one, zeros))
            }
            (left, right) => left.or(right),
        }
    }

    /// Sums over micro-steps of numbers that travel as `dtype`.
    pub(super) fn total<const N: usize>(self, micro_steps: &[[f64; N]], dtype: DType) -> [f64; N] {
        let add = |left: [f64; N], right: [f64; N]| std::array::from_fn(|i| left[i] + right[i]);
        if self == Self::AsTheyCome {
            return micro_steps.iter().copied().fold([0.0; N], add);
        }
        // The sum of two f32, taken in f64 and rounded, is their sum in f32.
        let rounded = |numbers: [f64; N]| match dtype {
            DType::F64 => numbers,
            _ => numbers.map(|number| f64::from(number as f32)),
        };
        let leaves: Vec<_> = micro_steps.iter().copied().map(rounded).collect();
        pairwise(&leaves, &|left, right| rounded(add(left, right))).unwrap_or([0.0; N])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sums that a stack in this order writes, and the largest number of sums that it held at once.
    fn streamed(leaves: usize) -> (Vec<String>, usize) {
        let (mut sums, mut alive) = (Vec::new(), 0);
        for number in 0..leaves {
            let mut sum = number.to_string();
            alive = alive.max(sums.len() + 1);
            for _ in 0..Order::Tree(leaves).joins(number) {
                let left: String = sums.pop().expect("a left branch");
                sum = format!("({left} {sum})");
            }
            sums.push(sum);
        }
        (sums, alive)
    }

    #[test]
    fn the_streamed_tree_is_the_pairwise_one() {
        for leaves in 1..=33 {
            let (sums, alive) = streamed(leaves);
            let texts: Vec<String> = (0..leaves).map(|leaf| leaf.to_string()).collect();
            let whole = pairwise(&texts, &|left, right| format!("({left} {right})"));
            assert_eq!(sums, [whole.expect("a leaf")], "{leaves} micro-steps");
            assert_eq!(alive, leaves.ilog2() as usize + 1, "{leaves} micro-steps");
        }
    }

    #[test]
    fn a_tree_over_ranks_of_trees_over_micro_steps_is_one_tree() {
        let add = |left: String, right: String| format!("({left} {right})");
        for micro_steps in 1..=9 {
            for ranks in [1, 2, 4, 8] {
                let texts: Vec<String> = (0..ranks * micro_steps).map(|leaf| leaf.to_string()).collect();
                let own: Vec<_> =
                    texts.chunks(micro_steps).filter_map(|texts| pairwise(texts, &add)).collect();
                assert_eq!(pairwise(&own, &add), pairwise(&texts, &add), "{ranks} x {micro_steps}");
            }
        }
    }

    #[test]
    fn numbers_are_added_in_the_type_that_travels() {
        let numbers: Vec<[f64; 2]> = (0..5).map(|i| [0.1 + f64::from(i), 1.0]).collect();
        let singles: Vec<f32> = numbers.iter().map(|number| number[0] as f32).collect();
        let expected = pairwise(&singles, &|left, right| left + right).expect("numbers");
        assert_eq!(Order::Tree(5).total(&numbers, DType::F32), [f64::from(expected), 5.0]);
        assert_eq!(Order::AsTheyCome.total(&numbers, DType::F32)[0], 0.1 + 1.1 + 2.1 + 3.1 + 4.1);
        assert_eq!(Order::Tree(1).total::<1>(&[], DType::F32), [0.0]);
    }
}
