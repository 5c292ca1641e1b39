//! Outputs of all ranks, gathered on rank 0 by one collective in each micro-step.
//!
//! ```text
//! rank r:  output -> Parts -> [Announcement | bytes of its tensors] --gather_bytes--> rank 0
//! rank 0:  messages of all ranks -> RankOutput of each -> GlobalParts -> DdpOutput::join -> one output
//! ```
//!
//! A rank without items sends an empty message. A rank whose tensors exceed its share of the byte limit sends the
//! announcement only: then the loss is global and the tensors are missing, which is an error if a metric needs them.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, TensorData};
use burn_ddp_comm::{Error, ErrorKind, Rank, Result};
use derive_new::new;
use serde::{Deserialize, Serialize};

use super::output::{DdpOutput, GlobalParts, Parts, RankOutput, aligned};
use crate::process_group::ProcessGroup;

/// Burn's names of the metrics that need no gathered tensors: the loss is always global, and the others describe the
/// machine or the schedule.
const NEED_NO_OUTPUT: [&str; 8] = [
    "Loss",
    "Learning Rate",
    "Iteration Speed",
    "CPU Usage",
    "CPU Temperature",
    "CPU Memory",
    "GPU Memory",
    "Cuda",
];

/// Gathers outputs on rank 0.
#[derive(new)]
pub(super) struct Outputs<G: Backend> {
    group: ProcessGroup<G>,
    /// Maximum number of bytes of tensors in a micro-step, over all ranks.
    limit: usize,
    /// Names of the registered metrics.
    #[new(default)]
    pub(super) metrics: Vec<String>,
}

/// Header of a rank's message, before the bytes of its tensors.
#[derive(Serialize, Deserialize)]
struct Announcement {
    items: usize,
    weight: f64,
    loss: Option<f64>,
    /// Number of bytes of the tensors, sent or not.
    bytes: usize,
    /// Dtype and shape of each tensor that follows; empty if they exceed the limit.
    tensors: Vec<(DType, Vec<usize>)>,
}

impl<G: Backend> Outputs<G> {
    /// Returns the output of the global batch on rank 0, and `None` on the others; all ranks call it. A rank without
    /// items gives `None`.
    pub(super) fn gather<O: DdpOutput>(&self, output: Option<O>) -> Result<Option<O>> {
        if self.group.world_size() == 1 {
            return output.map(O::alone).transpose();
        }
        let message = output.map_or_else(|| Ok(Vec::new()), |output| self.encode(output))?;
        let all = self.group.gather_bytes(message, Rank(0)).wait()?;
        let mut outputs = Vec::new();
        let mut bytes = 0;
        let mut withheld = false;
        for (rank, message) in all.iter().enumerate().filter(|(_, message)| !message.is_empty()) {
            let (output, full) = decode(message).map_err(|error| error.context(Rank(rank)))?;
            withheld |= full > 0 && output.parts.tensors.is_empty();
            bytes += full;
            outputs.push(output);
        }
        if withheld {
            self.refuse_metrics(bytes)?;
        }
        if outputs.is_empty() {
            return Ok(None);
        }
        let device = Box::new(self.group.device().clone());
        O::join(GlobalParts::new(outputs, withheld, Some(device))?).map(Some)
    }

    fn encode<O: DdpOutput>(&self, output: O) -> Result<Vec<u8>> {
        let (items, weight, parts) = (output.items(), output.weight(), output.parts());
        let bytes = parts.bytes();
        let fits = bytes <= self.limit / self.group.world_size();
        let tensors = if fits { parts.tensors } else { Vec::new() };
        let shapes = tensors.iter().map(|tensor| (tensor.dtype, tensor.shape.to_vec())).collect();
        let announcement = Announcement { items, weight, loss: parts.loss, bytes, tensors: shapes };
        let mut message = postcard::to_stdvec(&announcement)
            .map_err(|error| Error::with_source(ErrorKind::Io, "cannot encode an output", error))?;
        tensors.iter().for_each(|tensor| message.extend_from_slice(&tensor.bytes));
        Ok(message)
    }

    /// Returns an error that names the registered metrics that need the tensors that were not gathered, if there are
    /// any.
    fn refuse_metrics(&self, bytes: usize) -> Result<()> {
        let concerned: Vec<_> =
            self.metrics.iter().filter(|name| !NEED_NO_OUTPUT.contains(&name.as_str())).cloned().collect();
        if concerned.is_empty() {
            return Ok(());
        }
        Err(Error::config(format!(
            "the outputs of one micro-step are {bytes} bytes over all ranks, more than the limit of {} has room for \
             ({} a rank): only the loss is global, and {} cannot be computed; raise `with_output_limit`, return \
             smaller outputs, or leave these metrics out",
            self.limit,
            self.limit / self.group.world_size(),
            concerned.join(", ")
        )))
    }
}

/// Decodes a rank's message; returns its output and the number of bytes of its tensors, sent or not.
fn decode(message: &[u8]) -> Result<(RankOutput, usize)> {
    let wrong = || Error::new(ErrorKind::Mismatch, "sent an output of another version");
    let (announcement, mut rest) = postcard::take_from_bytes::<Announcement>(message).map_err(|_| wrong())?;
    let Announcement { items, weight, loss, bytes, tensors } = announcement;
    let mut parts = Parts { loss, ..Parts::new() };
    for (dtype, shape) in tensors {
        let length = shape.iter().product::<usize>() * dtype.size();
        let (piece, after) = rest.split_at_checked(length).ok_or_else(wrong)?;
        parts.tensors.push(TensorData::from_bytes(aligned(dtype, &[piece]), shape, dtype));
        rest = after;
    }
    Ok((RankOutput { items, weight, parts }, bytes))
}
