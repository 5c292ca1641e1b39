//! The partition of a model's parameters into buckets, each of which is one collective.
//!
//! A plan is a pure function of the parameters' specifications, so it is equal on all ranks once these have been
//! compared, and it can be printed and tested without a model. Gradients of late layers are ready first, hence reverse
//! visit order (with `overlap`, the order of arrival after the first step). A small first bucket starts communication
//! early.

use std::fmt;

use serde::{Deserialize, Serialize};

use burn_ddp_comm::{DType, Error, ErrorKind, Result};

/// Default largest bucket (PyTorch DDP's `bucket_cap_mb`).
pub(crate) const BUCKET_BYTES: usize = 25 << 20;
/// Default largest first bucket.
pub(crate) const FIRST_BUCKET_BYTES: usize = 1 << 20;

/// Minimum number of buckets when overlap chooses the size. A backward pass cannot hide the computation of the first
/// bucket and the transfer of the last, so both should be small.
const MIN_OVERLAPPED_BUCKETS: usize = 32;

/// Refuses bucket sizes of 0 and of more than `memory`, the memory of this machine where it is known.
///
/// # Errors
/// [`ErrorKind::Config`] naming the value.
pub(crate) fn check_bucket_bytes(bytes: usize, memory: Option<u64>) -> Result<()> {
    match memory {
        _ if bytes == 0 => {
            Err(Error::config("bucket_bytes is 0: give the largest bucket in bytes, or leave it out"))
        }
        Some(memory) if bytes as u64 > memory => Err(Error::config(format!(
            "bucket_bytes is {bytes}, more than this machine's memory of {memory} bytes: give a smaller one, or leave \
             it out"
        ))),
        _ => Ok(()),
    }
}

/// The role of a parameter in training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ParamRole {
    /// Float, trained: has a gradient.
    Trained,
    /// Float, but gradients are off.
    Frozen,
    /// Running statistics of a normalization layer: never a gradient.
    RunningState,
    /// Integer or boolean data of the model.
    Constant,
}

/// The properties of one parameter that must be equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ParamSpec {
    /// Names of the modules down to it, joined by dots.
    pub(crate) path: String,
    /// Sizes of all dimensions.
    pub(crate) shape: Vec<usize>,
    /// Element type.
    pub(crate) dtype: DType,
    /// Its role in training.
    pub(crate) role: ParamRole,
}

impl ParamSpec {
    /// Bytes of its elements.
    pub(crate) fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }
}

impl fmt::Display for ParamSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {:?} {}", self.path, self.shape, self.dtype)?;
        match self.role {
            ParamRole::Trained => Ok(()),
            ParamRole::Frozen => f.write_str(" (frozen)"),
            ParamRole::RunningState => f.write_str(" (running state)"),
            ParamRole::Constant => f.write_str(" (constant)"),
        }
    }
}

/// The first difference between the parameters of all ranks, as an error that names path and ranks.
/// `ranks[r]` are rank r's; `None` when all are equal.
pub(crate) fn first_difference(ranks: &[Vec<ParamSpec>]) -> Option<Error> {
    let (zero, others) = ranks.split_first()?;
    others.iter().enumerate().find_map(|(index, specs)| {
        let rank = index + 1;
        let position = (0..zero.len().max(specs.len())).find(|i| zero.get(*i) != specs.get(*i))?;
        let (first, other) = (zero.get(position), specs.get(position));
        let what = match (first, other) {
            (Some(a), Some(b)) => format!("parameter {position} is {a} on rank 0 and {b} on rank {rank}"),
            (Some(a), None) => format!("parameter {position}, {a} on rank 0, does not exist on rank {rank}"),
            (None, Some(b)) => format!("parameter {position}, {b} on rank {rank}, does not exist on rank 0"),
            (None, None) => return None,
        };
        Some(Error::new(
            ErrorKind::Mismatch,
            format!(
                "models differ: {what} ({} parameters on rank 0, {} on rank {rank}); \
                 build the same model on every rank",
                zero.len(),
                specs.len()
            ),
        ))
    })
}

/// Parameters that are reduced by one collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Element type of all of them.
    pub dtype: DType,
    /// Their positions among all parameters of the model in visit order, in the order on the wire.
    pub params: Vec<usize>,
    /// Bytes of all of them.
    pub bytes: usize,
}

/// Buckets in the order in which they are reduced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BucketPlan {
    /// The buckets.
    pub buckets: Vec<Bucket>,
}

impl BucketPlan {
    /// Packs the parameters `indices` of `specs` in the given order. A bucket holds one dtype and at most `cap`
    /// bytes (the first at most `first_cap`), or a single parameter that is larger.
    pub(crate) fn new(
        specs: &[ParamSpec],
        indices: impl IntoIterator<Item = usize>,
        first_cap: usize,
        cap: usize,
    ) -> Self {
        let mut buckets: Vec<Bucket> = Vec::new();
        for index in indices {
            let (dtype, bytes) = (specs[index].dtype, specs[index].bytes());
            let limit = if buckets.len() <= 1 { first_cap } else { cap };
            match buckets.last_mut() {
                Some(bucket) if bucket.dtype == dtype && bucket.bytes + bytes <= limit => {
                    bucket.params.push(index);
                    bucket.bytes += bytes;
                }
                _ => buckets.push(Bucket { dtype, params: vec![index], bytes }),
            }
        }
        Self { buckets }
    }

    /// The plan for gradients: trained parameters in reverse visit order. `cap` limits all buckets; without it the
    /// first holds [`FIRST_BUCKET_BYTES`] and the others [`BUCKET_BYTES`].
    pub(crate) fn for_gradients(specs: &[ParamSpec], cap: Option<usize>) -> Self {
        let trained = (0..specs.len()).rev().filter(|i| specs[*i].role == ParamRole::Trained);
        Self::new(specs, trained, cap.unwrap_or(FIRST_BUCKET_BYTES), cap.unwrap_or(BUCKET_BYTES))
    }
}

/// Largest bucket for `bytes` of gradients that are sent while a backward pass runs: a share of
/// [`MIN_OVERLAPPED_BUCKETS`], between [`FIRST_BUCKET_BYTES`] and [`BUCKET_BYTES`].
pub(crate) fn overlapped_cap(bytes: usize) -> usize {
    (bytes / MIN_OVERLAPPED_BUCKETS).clamp(FIRST_BUCKET_BYTES, BUCKET_BYTES)
}

impl fmt::Display for BucketPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, bucket) in self.buckets.iter().enumerate() {
            writeln!(
                f,
                "bucket {index}: {} x {}, {} bytes",
                bucket.params.len(),
                bucket.dtype,
                bucket.bytes
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(path: &str, shape: &[usize]) -> ParamSpec {
        ParamSpec { path: path.into(), shape: shape.into(), dtype: DType::F32, role: ParamRole::Trained }
    }

    fn sizes(plan: &BucketPlan) -> Vec<usize> {
        plan.buckets.iter().map(|bucket| bucket.bytes).collect()
    }

    #[test]
    fn a_bucket_is_at_most_the_cap_or_one_parameter() {
        let mut specs = vec![spec("big", &[30 << 18]), spec("one", &[1 << 18])];
        specs.extend((0..100).map(|i| spec(&format!("small.{i}"), &[256])));
        let plan = BucketPlan::for_gradients(&specs, None);
        assert_eq!(sizes(&plan), [100 << 10, 1 << 20, 30 << 20]);
        assert_eq!(plan.buckets[0].params[0], specs.len() - 1);
        let explicit = BucketPlan::for_gradients(&specs, Some(10 << 10));
        assert!(explicit.buckets.iter().all(|b| b.bytes <= 10 << 10 || b.params.len() == 1));
        assert_eq!(explicit.buckets.len(), 12);
    }

    #[test]
    fn buckets_that_leave_early_are_many_and_not_tiny() {
        assert_eq!([0, 128 << 20, 8 << 30].map(overlapped_cap), [1 << 20, 4 << 20, 25 << 20]);
    }

    #[test]
    fn two_hundred_small_parameters_are_one_bucket() {
        let specs: Vec<_> = (0..200).map(|i| spec(&i.to_string(), &[64])).collect();
        assert_eq!(BucketPlan::for_gradients(&specs, None).buckets.len(), 1);
    }

    #[test]
    fn a_bucket_of_nothing_or_of_more_than_there_is_is_refused_by_its_value() {
        let refused = |bytes, memory| check_bucket_bytes(bytes, memory).expect_err("refused").to_string();
        assert!(refused(0, None).contains("bucket_bytes is 0"));
        let text = refused(4097, Some(4096));
        assert!(text.contains("4097") && text.contains("4096"), "{text}");
        check_bucket_bytes(4096, Some(4096)).expect("fits");
        check_bucket_bytes(usize::MAX, None).expect("nobody knows better");
    }

    #[test]
    fn dtypes_do_not_mix_and_only_trained_parameters_are_planned() {
        let mut specs = vec![spec("a", &[1]), spec("b", &[1]), spec("c", &[1]), spec("d", &[1])];
        specs[1].dtype = DType::F16;
        specs[3].role = ParamRole::Frozen;
        let plan = BucketPlan::for_gradients(&specs, None);
        assert_eq!(plan.buckets.iter().map(|b| b.params.clone()).collect::<Vec<_>>(), [[2], [1], [0]]);
        assert!(plan.to_string().contains("1 x f16"));
    }

    #[test]
    fn the_first_difference_is_named() {
        let equal = vec![spec("a", &[2, 3])];
        assert!(first_difference(&[equal.clone(), equal.clone()]).is_none());
        let text =
            first_difference(&[equal.clone(), equal.clone(), vec![spec("a", &[3, 2])]]).unwrap().to_string();
        for word in ["`a` [2, 3]", "[3, 2]", "rank 0", "rank 2"] {
            assert!(text.contains(word), "{text}");
        }
        let text = first_difference(&[equal, vec![]]).unwrap().to_string();
        assert!(text.contains("does not exist on rank 1"), "{text}");
    }
}
