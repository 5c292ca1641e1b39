//! Values that layers above keep with a group for as long as it lives.
//!
//! Users pass data loaders and model layers around; what these must know of each other (which loaders are sharded,
//! whether a layer communicates) belongs to neither, and a static would mix up groups. The group keeps it without
//! knowing what it is: one value of each type.

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Default)]
pub(super) struct Attached(Mutex<BTreeMap<TypeId, Arc<dyn Any + Send + Sync>>>);

impl Attached {
    /// The value of type `T`, made when it is first asked for.
    pub(super) fn get<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let one = all.entry(TypeId::of::<T>()).or_insert_with(|| Arc::new(T::default()));
        one.clone().downcast().unwrap_or_default()
    }
}
