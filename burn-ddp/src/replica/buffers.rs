//! Making running states equal on all ranks.
//!
//! They are compared first and only those that differ are sent: a mean of equal values need not be that value (in f32
//! `(a + a + a) / 3` differs from `a` for every sixth `a`), and synchronized layers keep theirs equal anyway.

use burn::module::AutodiffModule;
use burn::tensor::backend::AutodiffBackend;
use burn_ddp_comm::{Error, ErrorKind, Rank, ReduceOp, Result};

use super::agreement::{decode, encode, hashes};
use crate::bucket::{BUCKET_BYTES, BucketPlan};
use crate::communicator::AnyTensor;
use crate::parameters;
use crate::process_group::ProcessGroup;

/// The running states that all ranks get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BufferSync {
    /// The mean over all ranks.
    #[default]
    Average,
    /// The states of rank 0.
    Root,
}

/// Makes the running states of `model` equal on all ranks.
///
/// # Errors
/// Different numbers of running states; any error of the group.
pub(super) fn sync<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    group: &ProcessGroup<B::InnerBackend>,
    how: BufferSync,
) -> Result<()> {
    let (positions, mut states): (Vec<_>, Vec<_>) = parameters::states::<B, M>(model)?.into_iter().unzip();
    if states.is_empty() {
        return Ok(());
    }
    let all = group.all_gather_bytes(encode(&hashes(&states)?)?)?;
    let all = all.iter().map(|bytes| decode(bytes)).collect::<Result<Vec<Vec<u64>>>>()?;
    if let Some(rank) = all.iter().position(|hashes| hashes.len() != states.len()) {
        return Err(group.barrier_then(Error::new(
            ErrorKind::Mismatch,
            format!(
                "{} has {} running states, {} has {}: synchronize the same model on every rank",
                Rank(rank),
                all[rank].len(),
                group.rank(),
                states.len()
            ),
        )));
    }
    let differs = |index: &usize| all.iter().any(|hashes| hashes[*index] != all[0][*index]);
    let specs: Vec<_> = states.iter().map(|state| state.spec.clone()).collect();
    let plan = BucketPlan::new(&specs, (0..specs.len()).filter(differs), BUCKET_BYTES, BUCKET_BYTES);
    let works: Vec<_> = plan
        .buckets
        .iter()
        .map(|bucket| {
            let own: Vec<AnyTensor<_>> =
                bucket.params.iter().filter_map(|index| states[*index].tensor.take()).collect();
            match how {
                BufferSync::Average => group.all_reduce_list(own, ReduceOp::Mean),
                BufferSync::Root => group.broadcast_list(own, Rank(0)),
            }
        })
        .collect();
    let mut values = std::collections::BTreeMap::new();
    for (bucket, work) in plan.buckets.iter().zip(works) {
        let received = work.wait().map_err(|error| error.context("in the exchange of running states"))?;
        values.extend(bucket.params.iter().map(|index| positions[*index]).zip(received));
    }
    parameters::set_running_states::<B, M>(model, values)
}
