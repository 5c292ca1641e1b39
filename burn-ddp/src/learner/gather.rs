//! Outputs of all ranks on their way to rank 0: one collective a micro-step, bounded in bytes.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, TensorData};
use serde::{Deserialize, Serialize};

use super::output::{DdpOutput, GlobalParts, Parts, Share, aligned};
use crate::error::{Error, ErrorKind, Result};
use crate::process_group::ProcessGroup;
use crate::rank::Rank;

/// Metrics that look at no output: the loss is global whatever is gathered, the others are of the machine or the
/// schedule. Names as Burn gives them.
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

/// Brings outputs to rank 0.
pub(super) struct Outputs<G: Backend> {
    group: ProcessGroup<G>,
    /// Largest number of bytes of a micro-step, over all ranks.
    limit: usize,
    /// Metrics that are registered, as far as this rank knows.
    pub(super) metrics: Vec<String>,
}

/// What precedes the bytes of a rank's tensors.
#[derive(Serialize, Deserialize)]
struct Announcement {
    items: usize,
    weight: f64,
    loss: Option<f64>,
    /// Bytes of the tensors, sent or not.
    bytes: usize,
    /// Empty where the limit forbids to send them.
    tensors: Vec<(DType, Vec<usize>)>,
}

impl<G: Backend> Outputs<G> {
    pub(super) fn new(group: ProcessGroup<G>, limit: usize) -> Self {
        Self { group, limit, metrics: Vec::new() }
    }

    /// The output of the global batch on rank 0, and nothing on the others. A rank without items gives `None`.
    pub(super) fn gather<O: DdpOutput>(&self, output: Option<O>) -> Result<Option<O>> {
        if self.group.world_size() == 1 {
            return output.map(O::alone).transpose();
        }
        let message = output.map_or_else(|| Ok(Vec::new()), |output| self.encode(output))?;
        let all = self.group.gather_bytes(message, Rank(0)).wait()?;
        let mut shares = Vec::new();
        let mut bytes = 0;
        let mut withheld = false;
        for (rank, message) in all.iter().enumerate().filter(|(_, message)| !message.is_empty()) {
            let (share, full) = decode(message).map_err(|error| error.context(Rank(rank)))?;
            withheld |= full > 0 && share.parts.tensors.is_empty();
            bytes += full;
            shares.push(share);
        }
        if withheld {
            self.refuse_metrics(bytes)?;
        }
        if shares.is_empty() {
            return Ok(None);
        }
        let device = Box::new(self.group.device().clone());
        O::join(GlobalParts::new(shares, withheld, Some(device))?).map(Some)
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

    /// An error that names the registered metrics that would be computed from outputs that were not gathered.
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

/// A rank's share, and the bytes its tensors have, sent or not.
fn decode(message: &[u8]) -> Result<(Share, usize)> {
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
    Ok((Share { items, weight, parts }, bytes))
}
