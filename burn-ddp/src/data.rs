//! Which rank trains on which items, so that N processes see the global batches of one.
