//! Gradients on their way from Burn's container to the reducer, and back.

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, Tensor, TensorPrimitive};
use burn_backend::{Scalar, TensorMetadata};
use burn_ddp_comm::{Error, ErrorKind, Rank, Result};

use super::{Reduced, ReplicaOptions, Reproducibility};
use crate::bucket::{ParamRole, ParamSpec};
use crate::norm;
use crate::process_group::ProcessGroup;
use crate::reducer::{OVERLAP_ADVICE, Reducer, Reduction};

/// Refuses a model with other parameters, `now`, than the replica was made with.
pub(super) fn check_ids(ids: &[ParamId], now: &[ParamId], specs: &[ParamSpec]) -> Result<()> {
    let Some(position) = (0..now.len().max(ids.len())).find(|i| now.get(*i) != ids.get(*i)) else {
        return Ok(());
    };
    let path = specs.get(position).map_or("a new parameter", |spec| spec.path.as_str());
    Err(Error::new(
        ErrorKind::Mismatch,
        format!(
            "the parameter set changed at `{path}` after the replica was made: \
             make a new replica with the changed model"
        ),
    ))
}

/// Takes the gradients of the parameters `ids` out of `gradients`, with their indices. Those that `reducer` has taken
/// during the backward pass are left out.
///
/// # Errors
/// Gradients that are not those of one backward pass of the model that the replica was made for.
pub(super) fn take<B: AutodiffBackend>(
    mut gradients: GradientsParams,
    ids: &[ParamId],
    reducer: &Reducer<B::InnerBackend>,
) -> Result<Vec<(usize, FloatTensor<B::InnerBackend>)>> {
    let mut list = Vec::new();
    for (index, (id, spec)) in ids.iter().zip(reducer.specs()).enumerate() {
        let gradient = gradients.remove::<B::InnerBackend, 1>(*id);
        let gradient = gradient.map(|gradient| gradient.into_primitive().tensor());
        let shape = gradient.as_ref().map(TensorMetadata::shape);
        if reducer.has_taken(index) {
            check_taken(spec, shape)?;
        } else if let (Some(gradient), Some(shape)) = (gradient, shape) {
            check_gradient(spec, &shape)?;
            list.push((index, gradient));
        }
    }
    if !gradients.is_empty() {
        return Err(Error::config(format!(
            "{} gradients belong to no parameter of the model: pass the model they were made from",
            gradients.len()
        )));
    }
    Ok(list)
}

/// Refuses a gradient, of `shape`, that cannot be the one of parameter `spec`.
fn check_gradient(spec: &ParamSpec, shape: &Shape) -> Result<()> {
    let mismatch = |message| Err(Error::new(ErrorKind::Mismatch, message));
    if spec.role != ParamRole::Trained {
        return mismatch(format!(
            "{spec} has a gradient: it was not trained when the replica was made; make a new one"
        ));
    }
    if shape.to_vec() == spec.shape {
        return Ok(());
    }
    if shape.num_elements() == 0 {
        return Err(Error::config(format!(
            "the gradient of {spec} was taken in a backward pass of another micro-step: hand each micro-step \
             over once, or {OVERLAP_ADVICE}"
        )));
    }
    mismatch(format!("the gradient of {spec} has shape {shape:?}"))
}

/// Refuses a micro-step without the empty tensor that was left where the gradient of `spec` was taken: then it is not
/// the backward pass whose gradients were sent, or not that one alone.
fn check_taken(spec: &ParamSpec, left: Option<Shape>) -> Result<()> {
    let what = match left {
        Some(shape) if shape.num_elements() == 0 => return Ok(()),
        Some(_) => "is not empty",
        None => "is missing",
    };
    Err(Error::config(format!(
        "the gradient of {spec} was taken in a backward pass, and in the micro-step that was handed over it {what}: a \
         micro-step is one backward pass, with all gradients of the model and of no copy of it (`no_grad` a copy that \
         is not trained); for others {OVERLAP_ADVICE}"
    )))
}

/// Takes the norm of the whole gradient and clips by it, where `options` say so.
///
/// # Errors
/// Any error of the group.
pub(super) fn clip<B: AutodiffBackend>(
    mut reduction: Reduction<B::InnerBackend>,
    ids: &[ParamId],
    group: &ProcessGroup<B::InnerBackend>,
    options: &ReplicaOptions,
) -> Result<Reduced> {
    let norm = if options.report_norm || options.clip_norm.is_some() {
        let in_tree = options.reproducibility != Reproducibility::FixedWorldSize;
        Some(global_norm(&mut reduction.gradients, group, in_tree)?)
    } else {
        None
    };
    let factor = match (norm, options.clip_norm) {
        (Some(norm), Some(limit)) if norm > limit => Some(limit / norm),
        _ => None,
    };
    let grads = register::<B::InnerBackend>(reduction.gradients, ids, factor);
    Ok(Reduced { grads, loss: reduction.loss, norm })
}

/// The norm of all `gradients` together, equal on all ranks. `in_tree` fixes the order of additions on devices too.
fn global_norm<B: Backend>(
    gradients: &mut [Option<FloatTensor<B>>],
    group: &ProcessGroup<B>,
    in_tree: bool,
) -> Result<f64> {
    if in_tree || group.in_host_memory() {
        return norm::through_host::<B>(gradients);
    }
    let mine = norm::on_device::<B>(gradients)?;
    if group.world_size() == 1 {
        return Ok(mine);
    }
    let rank_0 = group.broadcast_bytes(&mine.to_le_bytes(), Rank(0))?;
    let norm = rank_0.try_into().map(f64::from_le_bytes);
    norm.map_err(|_| Error::new(ErrorKind::Mismatch, "rank 0 sent no norm"))
}

/// Burn's container of `gradients`, which are in the order of `ids`, each times `factor` if there is one.
fn register<B: Backend>(
    gradients: Vec<Option<FloatTensor<B>>>,
    ids: &[ParamId],
    factor: Option<f64>,
) -> GradientsParams {
    let mut grads = GradientsParams::new();
    for (id, gradient) in ids.iter().zip(gradients) {
        let Some(gradient) = gradient else { continue };
        let gradient = match factor {
            Some(factor) => B::float_mul_scalar(gradient, Scalar::from(factor)),
            None => gradient,
        };
        grads.register(*id, Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(gradient)));
    }
    grads
}
