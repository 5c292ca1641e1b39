//! What a training or validation step returns, made global.
//!
//! Burn's metrics cannot be reached from a strategy, but what they are computed from can: one item a micro-step. So
//! the outputs of all ranks are brought together on rank 0 and joined into one output of the whole global batch, and
//! every metric, Burn's or a user's own, is right without knowing about ranks.

use std::any::Any;
use std::collections::VecDeque;

use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, DType, Int, Tensor, TensorData, TensorKind};
use burn::train::{
    ClassificationOutput, ItemLazy, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};
use burn_backend::Bytes;

use crate::error::{Error, ErrorKind, Result};

/// An output of a step that can be joined with those of other ranks. Burn's four outputs implement it.
///
/// An output of your own names its tensors in [`parts`](Self::parts), in any fixed order, and takes the joined ones
/// in the same order in [`join`](Self::join):
///
/// ```
/// use burn::tensor::{Tensor, Transaction, backend::Backend};
/// use burn::train::ItemLazy;
/// use burn_ddp::learner::{DdpOutput, GlobalParts, Parts};
///
/// struct Boxes<B: Backend> { loss: Tensor<B, 1>, boxes: Tensor<B, 3> }
///
/// impl<B: Backend> ItemLazy for Boxes<B> {
///     type ItemSync = Self;
///     fn sync(self) -> Self { self }
/// }
///
/// impl<B: Backend> DdpOutput for Boxes<B> {
///     fn items(&self) -> usize {
///         self.boxes.dims()[0]
///     }
///     fn parts(self) -> Parts {
///         Parts::new().with_loss(self.loss).with(self.boxes)
///     }
///     fn join(mut parts: GlobalParts) -> burn_ddp::Result<Self> {
///         Ok(Self { loss: parts.loss()?, boxes: parts.cat()? })
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be gathered from all ranks: it does not implement `DdpOutput`",
    label = "the output of this learner's model",
    note = "implement `burn_ddp::learner::DdpOutput` for it (items, parts, join), for training and validation outputs alike"
)]
pub trait DdpOutput: ItemLazy + Sized {
    /// Items of the batch it was made from.
    fn items(&self) -> usize;

    /// Whether [`weight`](Self::weight) is always the number of items of the batch as its loader counts them, so that it is
    /// known before the step: without that no gradient can leave during the backward pass (feature `overlap`). True of
    /// Burn's outputs except those of sequences; an output of your own may say so if it keeps `weight` as it is here, and
    /// its batcher makes one row an item.
    const WEIGHT_IS_ITEMS: bool = false;

    /// How much this output's loss and gradients count beside those of other ranks and micro-steps: over how many
    /// items (or tokens) the loss is a mean.
    fn weight(&self) -> f64 {
        self.items() as f64
    }

    /// Its tensors, as host memory.
    fn parts(self) -> Parts;

    /// The output of the global batch, from the parts of all ranks.
    ///
    /// # Errors
    /// When the parts do not fit together.
    fn join(parts: GlobalParts) -> Result<Self>;

    /// What [`join`](Self::join) makes of this output alone, for a world of one. Override it where that needs no
    /// copy to the host.
    fn alone(self) -> Result<Self> {
        let (items, weight) = (self.items(), self.weight());
        let mut parts = self.parts();
        let device = parts.device.take();
        Self::join(GlobalParts::new(vec![Share { items, weight, parts }], false, device)?)
    }
}

/// A device of some backend: outputs are of no one backend.
pub(super) type AnyDevice = Box<dyn Any + Send + Sync>;

/// The tensors of one rank's output.
#[derive(Debug, Default)]
pub struct Parts {
    pub(super) loss: Option<f64>,
    pub(super) tensors: Vec<TensorData>,
    /// Where what is joined goes, if nobody knows better.
    pub(super) device: Option<AnyDevice>,
}

impl Parts {
    /// No loss and no tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the loss: its mean, where it has several elements.
    pub fn with_loss<B: Backend>(mut self, loss: Tensor<B, 1>) -> Self {
        self.device.get_or_insert_with(|| Box::new(loss.device()));
        let values: Vec<f64> = loss.into_data().iter::<f64>().collect();
        Self { loss: Some(values.iter().sum::<f64>() / values.len() as f64), ..self }
    }

    /// Adds a tensor whose first dimension is the items.
    pub fn with<B: Backend, const D: usize, K: TensorKind<B> + BasicOps<B>>(
        mut self,
        tensor: Tensor<B, D, K>,
    ) -> Self {
        self.device.get_or_insert_with(|| Box::new(tensor.device()));
        self.tensors.push(tensor.into_data());
        self
    }

    pub(super) fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.bytes.len()).sum()
    }
}

/// One rank's part of a global batch.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) items: usize,
    pub(super) weight: f64,
    pub(super) parts: Parts,
}

/// The parts of all ranks that had items, in rank order, which is the order of the items in the global batch.
#[derive(Debug)]
pub struct GlobalParts {
    items: usize,
    loss: Option<f64>,
    /// By position in [`Parts`], the tensors of the ranks.
    tensors: VecDeque<Vec<TensorData>>,
    loss_only: bool,
    device: Option<AnyDevice>,
}

impl GlobalParts {
    /// From the `shares` of all ranks, to be joined on `device`.
    pub(super) fn new(shares: Vec<Share>, loss_only: bool, device: Option<AnyDevice>) -> Result<Self> {
        let disagree = |what: &str| {
            Error::new(ErrorKind::Mismatch, format!("ranks returned outputs of different {what}"))
        };
        let with_loss = shares.iter().filter(|share| share.parts.loss.is_some()).count();
        if with_loss != 0 && with_loss != shares.len() {
            return Err(disagree("form: some have a loss and some do not"));
        }
        let weight: f64 = shares.iter().map(|share| share.weight).sum();
        // A share without weight does not count, as in the gradient: its loss, a mean over nothing, is no number.
        let counted = shares.iter().filter(|share| share.weight != 0.0);
        let loss = counted.filter_map(|share| Some(share.parts.loss? * share.weight)).sum::<f64>();
        let loss = (with_loss > 0).then_some(loss / weight);
        let items = shares.iter().map(|share| share.items).sum();
        let count = shares.first().map_or(0, |share| share.parts.tensors.len());
        let mut tensors: VecDeque<Vec<TensorData>> = (0..count).map(|_| Vec::new()).collect();
        for share in shares {
            if share.parts.tensors.len() != count && !loss_only {
                return Err(disagree("numbers of tensors"));
            }
            tensors.iter_mut().zip(share.parts.tensors).for_each(|(all, one)| all.push(one));
        }
        Ok(Self { items, loss, tensors, loss_only, device })
    }

    /// The device that the parts are joined on. A `join` to another backend than the rank's has that one's default.
    fn device<B: Backend>(&self) -> B::Device {
        self.device.as_ref().and_then(|device| device.downcast_ref()).cloned().unwrap_or_default()
    }

    /// Items of the global batch.
    pub fn items(&self) -> usize {
        self.items
    }

    /// Whether outputs were too large to be gathered
    /// ([`DdpStrategy::with_output_limit`](super::DdpStrategy::with_output_limit)): then [`cat`](Self::cat) gives
    /// tensors without items, and only metrics that look at nothing but the loss are permitted.
    pub fn loss_only(&self) -> bool {
        self.loss_only
    }

    /// The mean loss of the global batch, once for each item, so that metrics that count its elements weigh batches
    /// by their items.
    ///
    /// # Errors
    /// When the parts had none.
    pub fn loss<B: Backend>(&self) -> Result<Tensor<B, 1>> {
        let loss = self.loss.ok_or_else(|| {
            Error::config("join asks for the loss, but parts gave none: call `Parts::with_loss`")
        })?;
        Ok(Tensor::full([self.items], loss, &self.device::<B>()))
    }

    /// The next tensor of all ranks, joined along the first dimension.
    ///
    /// # Errors
    /// When the other dimensions or the dtypes differ, naming them, or when there is no further tensor.
    pub fn cat<B: Backend, const D: usize, K: TensorKind<B> + BasicOps<B>>(
        &mut self,
    ) -> Result<Tensor<B, D, K>> {
        let device = self.device::<B>();
        if self.loss_only {
            return Ok(Tensor::empty([0; D], &device));
        }
        let all = self.each()?;
        let joined = cat(&all)?;
        if joined.shape.num_dims() != D {
            return Err(Error::config(format!(
                "join takes a tensor of {D} dimensions where parts gave one of shape {:?}: take them in the same order",
                joined.shape
            )));
        }
        let dtype = joined.dtype;
        Ok(Tensor::from_data(joined, (&device, dtype)))
    }

    /// The next tensor of each rank, for outputs that are joined in another way than along the first dimension.
    ///
    /// # Errors
    /// When there is no further tensor, and when outputs were too large to be gathered
    /// ([`loss_only`](Self::loss_only)).
    pub fn each(&mut self) -> Result<Vec<TensorData>> {
        if self.loss_only {
            return Err(Error::config(
                "the outputs were too large to be gathered: raise `with_output_limit`, or look at `loss_only` in join",
            ));
        }
        self.tensors.pop_front().ok_or_else(|| {
            Error::config("join takes more tensors than parts gave: give and take the same number")
        })
    }
}

/// `all` joined along the first dimension, in which row-major memory is simply continued.
fn cat(all: &[TensorData]) -> Result<TensorData> {
    let Some(first) = all.first() else {
        return Err(Error::config("there is no output to join"));
    };
    let fits = |one: &&TensorData| one.dtype == first.dtype && one.shape[1..] == first.shape[1..];
    if first.shape.num_dims() == 0 || !all.iter().all(|one| fits(&one)) {
        let shapes: Vec<_> = all.iter().map(|one| format!("{:?} of {:?}", one.shape, one.dtype)).collect();
        return Err(Error::new(
            ErrorKind::Mismatch,
            format!(
                "outputs of the ranks cannot be joined along the first dimension: {}; give them equal other \
                 dimensions (pad batches to one length) or join them yourself in `DdpOutput::join`",
                shapes.join(", ")
            ),
        ));
    }
    let mut shape = first.shape.clone();
    shape[0] = all.iter().map(|one| one.shape[0]).sum();
    let pieces: Vec<&[u8]> = all.iter().map(|one| &one.bytes[..]).collect();
    Ok(TensorData::from_bytes(aligned(first.dtype, &pieces), shape, first.dtype))
}

/// `pieces` one after the other, in memory aligned for elements of `dtype`.
pub(super) fn aligned(dtype: DType, pieces: &[&[u8]]) -> Bytes {
    fn fill<T: bytemuck::Pod + Send + Sync>(pieces: &[&[u8]]) -> Bytes {
        let total: usize = pieces.iter().map(|piece| piece.len()).sum();
        let mut all = vec![T::zeroed(); total.div_ceil(size_of::<T>())];
        let mut rest = bytemuck::cast_slice_mut::<T, u8>(&mut all);
        for piece in pieces {
            let (place, after) = rest.split_at_mut(piece.len());
            place.copy_from_slice(piece);
            rest = after;
        }
        Bytes::from_elems(all)
    }
    match dtype.size() {
        8 => fill::<u64>(pieces),
        4 => fill::<u32>(pieces),
        2 => fill::<u16>(pieces),
        _ => fill::<u8>(pieces),
    }
}

/// The mean of `loss`, once for each item, on its device.
fn per_item<B: Backend>(loss: Tensor<B, 1>, items: usize) -> Tensor<B, 1> {
    loss.mean().expand([items])
}

/// Outputs of Burn's that are a loss, an output and targets, with an item a row.
macro_rules! join_rows {
    ($($output:ident),*) => {$(
        impl<B: Backend> DdpOutput for $output<B> {
            const WEIGHT_IS_ITEMS: bool = true;

            fn items(&self) -> usize {
                self.targets.dims()[0]
            }

            fn parts(self) -> Parts {
                Parts::new().with_loss(self.loss).with(self.output).with(self.targets)
            }

            fn join(mut parts: GlobalParts) -> Result<Self> {
                Ok(Self::new(parts.loss()?, parts.cat()?, parts.cat()?))
            }

            fn alone(self) -> Result<Self> {
                let loss = per_item(self.loss.clone(), self.items());
                Ok(Self { loss, ..self })
            }
        }
    )*};
}

join_rows!(ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput);

/// Weighs by tokens, over which Burn's sequence losses are a mean; padding counts as tokens.
impl<B: Backend> DdpOutput for SequenceOutput<B> {
    fn items(&self) -> usize {
        self.targets.dims()[0]
    }

    fn weight(&self) -> f64 {
        let [sequences, length] = self.targets.dims();
        (sequences * length) as f64
    }

    fn parts(self) -> Parts {
        let parts = Parts::new().with_loss(self.loss).with(self.logits).with(self.targets);
        match self.predictions {
            Some(predictions) => parts.with(predictions),
            None => parts,
        }
    }

    fn join(mut parts: GlobalParts) -> Result<Self> {
        let (loss, logits, targets) = (parts.loss()?, parts.cat()?, parts.cat::<B, 2, Int>()?);
        let predictions = if parts.tensors.is_empty() { None } else { Some(parts.cat()?) };
        Ok(Self::new(loss, logits, predictions, targets))
    }

    fn alone(self) -> Result<Self> {
        let loss = per_item(self.loss.clone(), self.items());
        Ok(Self { loss, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_without_weight_adds_nothing_to_the_loss() {
        let share =
            |loss, weight| Share { items: 2, weight, parts: Parts { loss: Some(loss), ..Parts::new() } };
        let loss = |shares| GlobalParts::new(shares, false, None).map(|parts| parts.loss);
        // The mean over no tokens is no number.
        assert_eq!(
            loss(vec![share(1.0, 3.0), share(f64::NAN, 0.0), share(5.0, 1.0)]).expect("fits"),
            Some(2.0)
        );
        assert!(loss(vec![share(f64::NAN, 1.0), share(1.0, 1.0)]).expect("fits").is_some_and(f64::is_nan));
    }

    #[test]
    fn outputs_are_joined_where_the_rank_is() {
        use burn_dispatch::{Dispatch, DispatchDevice};
        let elsewhere = DispatchDevice::NdArray(Default::default());
        assert_ne!(elsewhere, DispatchDevice::default());
        let tensor = Tensor::<Dispatch, 1>::ones([2], &elsewhere);
        let mut parts = Parts::new().with_loss(tensor.clone().mean()).with(tensor);
        let device = parts.device.take();
        let share = Share { items: 2, weight: 2.0, parts };
        let mut joined = GlobalParts::new(vec![share], false, device).expect("fits");
        assert_eq!(joined.loss::<Dispatch>().expect("a loss").device(), elsewhere);
        assert_eq!(joined.cat::<Dispatch, 1, burn::tensor::Float>().expect("a tensor").device(), elsewhere);
        let mut other = GlobalParts::new(vec![], false, Some(Box::new(elsewhere))).expect("fits");
        other.loss_only = true;
        other
            .cat::<burn_flex::Flex, 1, burn::tensor::Float>()
            .expect("another backend has a device of its own");
    }
}
