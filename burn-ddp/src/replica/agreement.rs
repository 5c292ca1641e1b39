//! Making the models and optimizers of all ranks equal, and checks that they are.

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::{BinBytesRecorder, DoublePrecisionSettings, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_ddp_comm::{Error, ErrorKind, Rank, Result};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::bucket::{BUCKET_BYTES, BucketPlan, ParamRole, ParamSpec, first_difference};
use crate::communicator::{AnyTensor, into_data};
use crate::parameters::{self, ParamValue};
use crate::process_group::ProcessGroup;
use crate::replica::ReplicaOptions;

/// Gives `model` rank 0's values and ids on every rank: compares options and the parameters' specifications, sends
/// values and ids, and compares hashes of the received values.
pub(super) fn align<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: M,
    group: &ProcessGroup<B::InnerBackend>,
    options: &ReplicaOptions,
) -> Result<M> {
    group.ranks().compare("options", format!("{options:?}"))?;
    let mut params = parameters::collect::<B, M>(&model)?;
    check_can_be_kept_equal(&params, group)?;
    let specs: Vec<_> = params.iter().map(|param| param.spec.clone()).collect();
    compare_specs(&specs, group).map_err(|error| group.barrier_then(error))?;

    let ids: Vec<u64> = params.iter().map(|param| param.id.val()).collect();
    let ids: Vec<u64> = decode(&group.broadcast_bytes(&encode(&ids)?, Rank(0))?)?;
    // Buckets no larger than those of training, so that start-up needs no more memory.
    let cap = options.bucket_bytes.map_or(BUCKET_BYTES, |bytes| bytes.min(BUCKET_BYTES));
    let plan = BucketPlan::new(&specs, 0..specs.len(), cap, cap);
    for bucket in &plan.buckets {
        let tensors = bucket.params.iter().filter_map(|index| params[*index].tensor.take()).collect();
        let received = group.broadcast_list(tensors, Rank(0)).wait()?;
        for (index, tensor) in bucket.params.iter().zip(received) {
            params[*index].tensor = Some(tensor);
        }
    }
    let values = params.into_iter().zip(ids);
    let values = values.filter_map(|(param, id)| Some((id.into(), param.tensor?))).collect();
    let model = parameters::replace::<B, M>(model, values)?;
    let params = parameters::collect::<B, M>(&model)?;
    compare_values(&params, group, "after the broadcast from rank 0")
        .map_err(|error| group.barrier_then(error))?;
    Ok(model)
}

/// Compares the parameters of `model` on all ranks by hash; running states, which may differ between ranks, are
/// left out. `step` is the optimizer step that the message names. All ranks must call it.
///
/// # Errors
/// [`ErrorKind::Diverged`] naming the first parameter that differs and the ranks, on every rank; any error of the
/// group.
pub fn verify_parameters<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    group: &ProcessGroup<B::InnerBackend>,
    step: usize,
) -> Result<()> {
    let mut params = parameters::collect::<B, M>(model).inspect_err(|error| group.fail(error))?;
    params.retain(|param| param.spec.role != ParamRole::RunningState);
    compare_values(&params, group, &format!("at step {step}")).map_err(|error| {
        let error = group.barrier_then(error);
        group.fail(&error);
        error
    })
}

/// Refuses models that can be trained in one process but would not stay equal in several.
fn check_can_be_kept_equal<B: Backend>(params: &[ParamValue<B>], group: &ProcessGroup<B>) -> Result<()> {
    for (index, param) in params.iter().enumerate() {
        if let Some(other) = params[..index].iter().find(|other| other.id == param.id) {
            return Err(Error::config(format!(
                "`{}` and `{}` are one parameter in two places: Burn keeps them together only until the first \
                 optimizer step; give the value one place and use it from both",
                other.spec.path, param.spec.path
            )));
        }
        let device = param.tensor.as_ref().map(AnyTensor::device);
        if let Some(device) = device.filter(|device| device != group.device()) {
            return Err(Error::config(format!(
                "{} is on device {device:?}, but the group was made for {:?}: use one device for both",
                param.spec,
                group.device()
            )));
        }
    }
    Ok(())
}

/// A hash of all parameters of `model` except running states.
pub(super) fn hash<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Result<u64> {
    let mut params = parameters::collect::<B, M>(model)?;
    params.retain(|param| param.spec.role != ParamRole::RunningState);
    Ok(combine(&hashes(&params)?))
}

fn compare_specs<B: Backend>(specs: &[ParamSpec], group: &ProcessGroup<B>) -> Result<()> {
    let mine = encode(&specs)?;
    let prints = group.all_gather_bytes(xxh3_64(&mine).to_le_bytes().to_vec())?;
    if prints.iter().all(|print| *print == prints[0]) {
        return Ok(());
    }
    let all = group.all_gather_bytes(mine)?;
    let all = all.iter().map(|bytes| decode(bytes)).collect::<Result<Vec<Vec<ParamSpec>>>>()?;
    match first_difference(&all) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn compare_values<B: Backend>(params: &[ParamValue<B>], group: &ProcessGroup<B>, when: &str) -> Result<()> {
    let mine = hashes(params)?;
    let all = group.all_gather_bytes(combine(&mine).to_le_bytes().to_vec())?;
    if all.iter().all(|other| *other == all[0]) {
        return Ok(());
    }
    let all = group.all_gather_bytes(encode(&mine)?)?;
    let all = all.iter().map(|bytes| decode(bytes)).collect::<Result<Vec<Vec<u64>>>>()?;
    for (index, param) in params.iter().enumerate() {
        let differs = |rank: &usize| all[*rank].get(index) != all[0].get(index);
        let ranks: Vec<_> = (1..all.len()).filter(differs).map(|rank| Rank(rank).to_string()).collect();
        if !ranks.is_empty() {
            return Err(Error::new(
                ErrorKind::Diverged,
                format!(
                    "ranks differ {when}, first at {}: {} from rank 0; is every gradient reduced, and is every \
                     parameter changed by the optimizer alone?",
                    param.spec,
                    ranks.join(", ")
                ),
            ));
        }
    }
    Err(Error::new(ErrorKind::Diverged, format!("ranks differ {when} in the number of their parameters")))
}

pub(super) fn hashes<B: Backend>(params: &[ParamValue<B>]) -> Result<Vec<u64>> {
    let one = |tensor: &AnyTensor<B>| Ok(xxh3_64(&into_data(tensor.clone())?.bytes));
    params.iter().filter_map(|param| param.tensor.as_ref()).map(one).collect()
}

/// `optimizer` with rank 0's state.
pub(super) fn broadcast_optimizer<B, M, O>(optimizer: O, group: &ProcessGroup<B::InnerBackend>) -> Result<O>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    let recorder = BinBytesRecorder::<DoublePrecisionSettings>::default();
    let failed = |what: &str, error: String| {
        let error = Error::with_source(ErrorKind::Io, format!("cannot {what} the optimizer state"), error);
        group.fail(&error);
        error
    };
    let mine = if group.rank().is_root() {
        let bytes = Recorder::<B>::record(&recorder, optimizer.to_record(), ());
        bytes.map_err(|error| failed("save", error.to_string()))?
    } else {
        Vec::new()
    };
    let bytes = group.broadcast_bytes(&mine, Rank(0))?;
    let record = Recorder::<B>::load(&recorder, bytes, group.device());
    let record = record.map_err(|error| failed("load", error.to_string()))?;
    Ok(optimizer.load_record(record))
}

fn combine(hashes: &[u64]) -> u64 {
    let mut all = Xxh3::new();
    hashes.iter().for_each(|hash| all.update(&hash.to_le_bytes()));
    all.digest()
}

pub(super) fn encode<T: serde::Serialize>(value: &T) -> Result<Vec<u8>> {
    postcard::to_stdvec(value)
        .map_err(|error| Error::with_source(ErrorKind::Io, "cannot encode a message", error))
}

pub(super) fn decode<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| {
        Error::with_source(ErrorKind::Mismatch, "a rank sent a message of another version", error)
    })
}
