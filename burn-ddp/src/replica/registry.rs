//! The registry of the process: parameter id -> reducer of a living replica.
//!
//! Burn's hook into the backward pass (`backend/hook.rs`) is a function without `self`: it gets a parameter's id and
//! its gradient. So there is one table for the process. It is the only static of this package below the learner, holds
//! no reducer alive, and knows no backend. An id that is not in it, or that two living replicas have registered,
//! belongs to no reducer, and its gradient is sent after the backward pass like any other.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_backend::distributed::{DistributedParamId, DistributedParams};
use burn_ddp_comm::Error;

use crate::reducer::SharedReducer;

/// A reducer of any backend, and the parameter's index in it.
type Entry = (Weak<dyn Any + Send + Sync>, usize);

/// Accessed by id only: the order of a map must not decide in which order anything is sent.
static ENTRIES: LazyLock<Mutex<HashMap<DistributedParamId, Vec<Entry>>>> = LazyLock::new(Mutex::default);

/// Registers parameters `ids`, in the order of their indices, with `reducer`, also if it does not overlap: a backward
/// pass that reaches its parameters and another replica's must not be taken for the other's alone.
pub(super) fn register<B: Backend>(ids: impl IntoIterator<Item = u64>, reducer: &Arc<SharedReducer<B>>) {
    let mut entries = ENTRIES.lock().unwrap_or_else(PoisonError::into_inner);
    for all in entries.values_mut() {
        all.retain(|(reducer, _)| reducer.strong_count() > 0);
    }
    entries.retain(|_, all| !all.is_empty());
    for (index, id) in ids.into_iter().enumerate() {
        let weak: Weak<SharedReducer<B>> = Arc::downgrade(reducer);
        entries.entry(id.into()).or_default().push((weak, index));
    }
}

/// All living reducers of parameter `id`.
fn living(id: DistributedParamId) -> Vec<(Arc<dyn Any + Send + Sync>, usize)> {
    let entries = ENTRIES.lock().unwrap_or_else(PoisonError::into_inner);
    let all = entries.get(&id).into_iter().flatten();
    all.filter_map(|(weak, index)| Some((weak.upgrade()?, *index))).collect()
}

/// The reducer of parameter `id`, if exactly one living replica has it.
fn find<B: Backend>(id: DistributedParamId) -> Option<(Arc<SharedReducer<B>>, usize)> {
    let [(reducer, index)] = <[_; 1]>::try_from(living(id)).ok()?;
    Some((reducer.downcast().ok()?, index))
}

/// A backward pass begins that reaches the marked parameters `params`. A pass that reaches parameters of several
/// replicas is a micro-step of at most one of them, and it is not known of which: then no reducer takes gradients.
pub(crate) fn backward_begins<B: Backend>(params: &[DistributedParams]) {
    let mut reducers: Vec<Arc<SharedReducer<B>>> = Vec::new();
    let all = params.iter().flat_map(|param| living(param.param_id));
    for reducer in all.filter_map(|(reducer, _)| reducer.downcast().ok()) {
        if !reducers.iter().any(|known| Arc::ptr_eq(known, &reducer)) {
            reducers.push(reducer);
        }
    }
    let alone = reducers.len() == 1;
    reducers.iter().for_each(|reducer| reducer.lock().backward_begins(alone));
}

/// The gradient of a marked parameter is complete. A panic, for example of the backend, must not unwind through Burn's
/// graph, whose lock is held: it is kept as an error.
pub(crate) fn gradient_ready<B: Backend>(param: &DistributedParams, gradient: &mut FloatTensor<B>) {
    let Some((reducer, index)) = find::<B>(param.param_id) else { return };
    let mut reducer = reducer.lock();
    let outcome = catch_unwind(AssertUnwindSafe(|| reducer.gradient_ready(index, gradient)));
    if let Err(payload) = outcome {
        reducer.hook_failed(Error::panicked("the reduction of a gradient in the backward pass", &*payload));
    }
}

#[cfg(test)]
mod tests {
    use burn_ndarray::NdArray;

    use super::*;
    use crate::process_group::ProcessGroup;
    use crate::reducer::{GradientReduction, Order, Reducer, ReducerOptions};

    type B = NdArray<f32>;

    fn reducer() -> Arc<SharedReducer<B>> {
        let options = ReducerOptions {
            reduction: GradientReduction::Mean,
            order: Order::AsTheyCome,
            bucket_bytes: None,
            buckets_in_flight: 1,
            accumulation: None,
            overlap: true,
        };
        let group = ProcessGroup::solo(&Default::default());
        Arc::new(SharedReducer::new(Reducer::new(group, Vec::new(), options)))
    }

    #[test]
    fn a_parameter_is_one_living_reducers_or_nobodys() {
        let found = |id: u64| find::<B>(id.into()).map(|(_, index)| index);
        let ids = [u64::MAX - 1, u64::MAX];
        let first = reducer();
        register(ids, &first);
        assert_eq!((found(ids[0]), found(ids[1])), (Some(0), Some(1)));
        assert!(find::<NdArray<f64>>(ids[0].into()).is_none(), "another backend");
        let second = reducer();
        register([ids[1]], &second);
        assert_eq!((found(ids[0]), found(ids[1])), (Some(0), None));
        drop(first);
        assert_eq!((found(ids[0]), found(ids[1])), (None, Some(0)));
        drop(second);
        assert_eq!(found(ids[1]), None);
    }
}
