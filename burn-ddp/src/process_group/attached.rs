//! State of the floors above, kept with the group whose ranks it concerns.
//!
//! Data loaders and layers are handed around by users; what they must know of each other (which loaders are
//! sharded, whether a layer communicates) belongs to neither, and a static would mix up groups. The group keeps it
//! without knowing what it is.

use std::any::{Any, TypeId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

#[derive(Default)]
pub(super) struct Attached(Mutex<BTreeMap<TypeId, Arc<dyn Any + Send + Sync>>>);

impl Attached {
    pub(super) fn get<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let one = all.entry(TypeId::of::<T>()).or_insert_with(|| Arc::new(T::default()));
        one.clone().downcast().unwrap_or_default()
    }
}
