//! The start of a training: the same learner on every rank, at the epoch from which rank 0 continues.
//!
//! ```text
//! compare options -> rank 0 loads its checkpoint -> epoch, model, optimizer and schedule to all ranks -> seed
//! ```

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::train::{Learner, LearningComponentsTypes, TrainingComponents};
use burn_ddp_comm::{Error, Rank, Result};

use super::options::DdpStrategy;
use super::panics::Panics;
use super::state;
use super::types::Inner;
use crate::parameters;
use crate::replica::{Replica, Reproducibility, split_mix64};

/// A learner and its replica before the first epoch.
pub(super) struct Prepared<LC: LearningComponentsTypes> {
    pub(super) learner: Learner<LC>,
    pub(super) replica: Replica<LC::Backend>,
    pub(super) first_epoch: usize,
}

/// Gives every rank rank 0's learner, at the epoch from which rank 0 continues; all ranks call it.
pub(super) fn prepare<LC: LearningComponentsTypes>(
    ddp: &DdpStrategy<Inner<LC>>,
    panics: &Panics,
    mut learner: Learner<LC>,
    components: &TrainingComponents<LC>,
) -> Result<Prepared<LC>> {
    let group = &ddp.group;
    compare_options(ddp, components)?;
    learner.fork(group.device());
    let mut last_epoch = 0;
    if group.rank().is_root() {
        last_epoch = components.checkpoint.unwrap_or(0);
        learner = load_checkpoint(ddp, panics, learner, components)?;
    }
    let last_epoch = group.broadcast_bytes(&last_epoch.to_le_bytes(), Rank(0))?;
    let last_epoch = last_epoch.try_into().map_or(0, usize::from_le_bytes);
    let (model, replica) = Replica::new(learner.model(), group, ddp.options.replica.clone())?;
    if group.world_size() > 1 {
        learner.load_model(model.into_record());
        state::broadcast(&mut learner, &components.event_store, group)?;
    }
    if let Rank(rank @ 1..) = group.rank() {
        // The epoch is mixed in so that a resumed training does not repeat the numbers of its first epoch.
        let seed = split_mix64(split_mix64(ddp.options.seed, rank as u64), last_epoch as u64);
        <LC::Backend as Backend>::seed(group.device(), seed);
    }
    Ok(Prepared { learner, replica, first_epoch: last_epoch + 1 })
}

fn compare_options<LC: LearningComponentsTypes>(
    ddp: &DdpStrategy<Inner<LC>>,
    components: &TrainingComponents<LC>,
) -> Result<()> {
    ddp.group.ranks().agree_on_error(match (components.grad_accumulation, ddp.options.replica.reproducibility) {
        (Some(0), _) => {
            Err(Error::config("grads_accumulation(0): give the micro-steps of an optimizer step"))
        }
        (_, Reproducibility::AnyWorldSize { .. }) => Err(Error::config(
            "Reproducibility::AnyWorldSize with a Learner: it divides every batch among the ranks, so that each \
             number of ranks computes other sums; use a loop of your own, with the same micro-batches in all \
             worlds",
        )),
        _ => Ok(()),
    })?;
    let options = format!(
        "{} epochs, gradients accumulated over {}, {:?}",
        components.num_epochs,
        components.grad_accumulation.unwrap_or(1),
        ddp.options
    );
    ddp.group.ranks().compare("trainings", options)
}

/// Loads the checkpoint that the program asked for, if any, and checks that it is of the learner's model.
fn load_checkpoint<LC: LearningComponentsTypes>(
    ddp: &DdpStrategy<Inner<LC>>,
    panics: &Panics,
    learner: Learner<LC>,
    components: &TrainingComponents<LC>,
) -> Result<Learner<LC>> {
    let (Some(epoch), Some(checkpointer)) = (components.checkpoint, &components.checkpointer) else {
        return Ok(learner);
    };
    let built = specs(&learner);
    let loaded = panics.guard_threads(&format!("loading checkpoint {epoch}"), || {
        checkpointer.load_checkpoint(learner, ddp.group.device(), epoch)
    });
    let learner = loaded.map_err(|error| {
        error.context(format!(
            "checkpoint({epoch}) cannot be loaded; is it in the folder `checkpoint` of the artifacts, saved \
             by the same recorder"
        ))
    })?;
    check_same_model(&built, &specs(&learner))
        .map_err(|error| error.context(format!("checkpoint {epoch} is of another model")))?;
    Ok(learner)
}

/// Path and shape of every parameter.
fn specs<LC: LearningComponentsTypes>(learner: &Learner<LC>) -> Vec<(String, Vec<usize>)> {
    let params = parameters::describe::<LC::Backend, _>(&learner.model());
    params.into_iter().map(|param| (param.spec.path, param.spec.shape)).collect()
}

/// Refuses a record that changed the model: Burn accepts any shape and drops layers that a record lacks.
fn check_same_model(built: &[(String, Vec<usize>)], loaded: &[(String, Vec<usize>)]) -> Result<()> {
    let shape_of = |all: &[(String, Vec<usize>)], path: &str| {
        all.iter().find(|one| one.0 == path).map(|one| one.1.clone())
    };
    for (path, here) in built {
        match shape_of(loaded, path) {
            None => return Err(Error::config(format!("it has no `{path}`, which the learner's model has"))),
            Some(there) if there != *here => {
                return Err(Error::config(format!(
                    "`{path}` is {there:?} there and {here:?} in the learner's model"
                )));
            }
            Some(_) => {}
        }
    }
    match loaded.iter().find(|(path, _)| shape_of(built, path).is_none()) {
        None => Ok(()),
        Some((path, _)) => Err(Error::config(format!("it has `{path}`, which the learner's model has not"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_differ_by_rank_and_by_seed() {
        let seeds = [split_mix64(0, 1), split_mix64(0, 2), split_mix64(1, 1), split_mix64(1, 2)];
        assert!((1..4).all(|i| !seeds[..i].contains(&seeds[i])), "{seeds:?}");
        assert_eq!(split_mix64(7, 3), split_mix64(7, 3));
    }
}
