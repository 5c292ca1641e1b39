//! Optimizer state and learning rate schedule of a learner, sent from rank 0 to all ranks.
//!
//! Burn's `Learner` gives access to neither, but it hands records of both to a checkpointer. So a checkpointer that
//! keeps records in memory reads them, and `load_optim` and `load_scheduler` write them.

use std::sync::{Arc, Mutex, PoisonError};

use burn::record::{BinBytesRecorder, DoublePrecisionSettings, Record, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerOptimizerRecord, LearnerSchedulerRecord, LearningCheckpointer};
use burn::train::{LearningComponentsTypes, TrainingBackend};
use burn_ddp_comm::{Error, ErrorKind, Rank, Result};

use crate::process_group::ProcessGroup;

/// Gives `learner` on every rank rank 0's optimizer state and position in the learning rate schedule; all ranks call
/// it.
pub(super) fn broadcast<LC: LearningComponentsTypes>(
    learner: &mut Learner<LC>,
    store: &EventStoreClient,
    group: &ProcessGroup<<LC::Backend as AutodiffBackend>::InnerBackend>,
) -> Result<()> {
    let (optimizer, scheduler) = if group.rank().is_root() {
        let (optimizer, scheduler) = records(learner, store)?;
        (encode::<TrainingBackend<LC>, _>(optimizer)?, encode::<TrainingBackend<LC>, _>(scheduler)?)
    } else {
        (Vec::new(), Vec::new())
    };
    let optimizer = group.broadcast_bytes(&optimizer, Rank(0))?;
    let scheduler = group.broadcast_bytes(&scheduler, Rank(0))?;
    // Rank 0 loads its own record too: a record changes half precision, and all ranks must end with equal numbers.
    let device = group.device();
    learner.load_optim(decode::<TrainingBackend<LC>, LearnerOptimizerRecord<LC>>(optimizer, device)?);
    learner.load_scheduler(decode::<TrainingBackend<LC>, LearnerSchedulerRecord<LC>>(scheduler, device)?);
    Ok(())
}

fn records<LC: LearningComponentsTypes>(
    learner: &Learner<LC>,
    store: &EventStoreClient,
) -> Result<(LearnerOptimizerRecord<LC>, LearnerSchedulerRecord<LC>)> {
    let (optimizer, scheduler) = (RecordSlot::default(), RecordSlot::default());
    let mut checkpointer = LearningCheckpointer::<LC>::new(
        AsyncCheckpointer::new(RecordSlot::default()),
        AsyncCheckpointer::new(optimizer.clone()),
        AsyncCheckpointer::new(scheduler.clone()),
        Box::new(Always),
    );
    checkpointer.checkpoint(learner, 0, store);
    // Dropping waits for its threads, and so for the records.
    drop(checkpointer);
    match (optimizer.take(), scheduler.take()) {
        (Some(optimizer), Some(scheduler)) => Ok((optimizer, scheduler)),
        _ => Err(Error::new(ErrorKind::Program, "the learner gave no record of its optimizer or scheduler")),
    }
}

fn encode<B: Backend, R: Record<B>>(record: R) -> Result<Vec<u8>> {
    let recorder = BinBytesRecorder::<DoublePrecisionSettings>::default();
    Recorder::<B>::record(&recorder, record, ()).map_err(|error| failed("save", error))
}

fn decode<B: Backend, R: Record<B>>(bytes: Vec<u8>, device: &B::Device) -> Result<R> {
    let recorder = BinBytesRecorder::<DoublePrecisionSettings>::default();
    Recorder::<B>::load(&recorder, bytes, device).map_err(|error| failed("load", error))
}

fn failed(what: &str, error: impl std::fmt::Display) -> Error {
    let message = format!("cannot {what} the state of the optimizer or scheduler");
    Error::with_source(ErrorKind::Io, message, error.to_string())
}

/// A checkpointer that keeps the last record in memory.
struct RecordSlot<R>(Arc<Mutex<Option<R>>>);

impl<R> Default for RecordSlot<R> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<R> Clone for RecordSlot<R> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<R> RecordSlot<R> {
    fn take(&self) -> Option<R> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<R: Record<B>, B: Backend> Checkpointer<R, B> for RecordSlot<R> {
    fn save(&self, _epoch: usize, record: R) -> Result<(), CheckpointerError> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(record);
        Ok(())
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _epoch: usize, _device: &B::Device) -> Result<R, CheckpointerError> {
        self.take().ok_or_else(|| CheckpointerError::Unknown("nothing was saved".into()))
    }
}

/// A strategy that saves at every opportunity.
struct Always;

impl CheckpointingStrategy for Always {
    fn checkpointing(&mut self, _epoch: usize, _store: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}
