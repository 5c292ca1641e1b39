//! Which reducer wants the gradient of which parameter.
//!
//! Burn's hook into the backward pass (`backend/hook.rs`) is a function without `self`: it is given a parameter's id and
//! its gradient. So there is one table for the process, from ids to the reducers of living replicas, and it is the one
//! static of the floors up to the learner. It holds no reducer alive, knows no backend, and decides nothing: an
//! id that is not in it, or that two living replicas claim, is no reducer's, and its gradient is sent after the
//! backward pass like any other.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_backend::distributed::{DistributedParamId, DistributedParams};

use super::SharedReducer;
use crate::error::Error;

/// A reducer of any backend, and the parameter's index in it.
type Claim = (Weak<dyn Any + Send + Sync>, usize);

/// Looked up by id and never walked to decide what is sent.
static CLAIMS: LazyLock<Mutex<HashMap<DistributedParamId, Vec<Claim>>>> = LazyLock::new(Mutex::default);

/// Says that parameters `ids` are `reducer`'s, by its index, whether or not anything of it leaves early: a backward pass
/// that reaches them and those of another is not the other's alone.
pub(crate) fn claim<B: Backend>(ids: impl IntoIterator<Item = u64>, reducer: &Arc<SharedReducer<B>>) {
    let mut claims = CLAIMS.lock().unwrap_or_else(PoisonError::into_inner);
    for all in claims.values_mut() {
        all.retain(|(reducer, _)| reducer.strong_count() > 0);
    }
    claims.retain(|_, all| !all.is_empty());
    for (index, id) in ids.into_iter().enumerate() {
        let weak: Weak<SharedReducer<B>> = Arc::downgrade(reducer);
        claims.entry(id.into()).or_default().push((weak, index));
    }
}

/// All living reducers of parameter `id`.
fn living(id: DistributedParamId) -> Vec<(Arc<dyn Any + Send + Sync>, usize)> {
    let claims = CLAIMS.lock().unwrap_or_else(PoisonError::into_inner);
    let all = claims.get(&id).into_iter().flatten();
    all.filter_map(|(weak, index)| Some((weak.upgrade()?, *index))).collect()
}

/// The one living reducer that wants the gradient of parameter `id`.
fn find<B: Backend>(id: DistributedParamId) -> Option<(Arc<SharedReducer<B>>, usize)> {
    let [(reducer, index)] = <[_; 1]>::try_from(living(id)).ok()?;
    Some((reducer.downcast().ok()?, index))
}

/// A backward pass begins that reaches the marked parameters `params`. One that reaches parameters of several replicas
/// is a micro-step of one of them at most, and nobody knows of which: then all wait until they are told.
pub(crate) fn announce<B: Backend>(params: &[DistributedParams]) {
    let mut reducers: Vec<Arc<SharedReducer<B>>> = Vec::new();
    let all = params.iter().flat_map(|param| living(param.param_id));
    for reducer in all.filter_map(|(reducer, _)| reducer.downcast().ok()) {
        if !reducers.iter().any(|known| Arc::ptr_eq(known, &reducer)) {
            reducers.push(reducer);
        }
    }
    let alone = reducers.len() == 1;
    reducers.iter().for_each(|reducer| reducer.lock().begin(alone));
}

/// The gradient of a marked parameter is complete. A panic (of the backend, say) must not leave through Burn's graph,
/// whose lock is held: it is kept as an error.
pub(crate) fn hand_over<B: Backend>(param: &DistributedParams, gradient: &mut FloatTensor<B>) {
    let Some((reducer, index)) = find::<B>(param.param_id) else { return };
    let mut reducer = reducer.lock();
    let offered = catch_unwind(AssertUnwindSafe(|| reducer.offer(index, gradient)));
    if let Err(payload) = offered {
        reducer.early.fail(Error::panicked("the reduction of a gradient in the backward pass", &*payload));
    }
}

#[cfg(test)]
mod tests {
    use burn_ndarray::NdArray;

    use super::super::{GradientReduction, Order, Reducer};
    use super::*;

    type B = NdArray<f32>;

    fn reducer() -> Arc<SharedReducer<B>> {
        Arc::new(SharedReducer::new(Reducer::new(
            Vec::new(),
            None,
            GradientReduction::Mean,
            Order::AsTheyCome,
        )))
    }

    #[test]
    fn a_parameter_is_one_living_reducers_or_nobodys() {
        let found = |id: u64| find::<B>(id.into()).map(|(_, index)| index);
        let ids = [u64::MAX - 1, u64::MAX];
        let first = reducer();
        claim(ids, &first);
        assert_eq!((found(ids[0]), found(ids[1])), (Some(0), Some(1)));
        assert!(find::<NdArray<f64>>(ids[0].into()).is_none(), "another backend");
        let second = reducer();
        claim([ids[1]], &second);
        assert_eq!((found(ids[0]), found(ids[1])), (Some(0), None));
        drop(first);
        assert_eq!((found(ids[0]), found(ids[1])), (None, Some(0)));
        drop(second);
        assert_eq!(found(ids[1]), None);
    }
}
