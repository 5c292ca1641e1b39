//! Outputs of training and validation steps that can be joined to the output of the global batch.
//!
//! A strategy cannot reach Burn's metrics, but it gives them their input: one output in each micro-step. The outputs of
//! all ranks are joined on rank 0, so every metric, Burn's or a user's own, is computed from the global batch without
//! knowing of ranks. With `n_r` items on rank r, weight `w_r`, and N items in all:
//!
//! ```text
//! rank r:  loss [..] -> mean l_r          tensors [n_r, ..]
//! joined:  loss [N], each sum(w_r l_r) / sum(w_r)     tensors [N, ..], ranks one after the other
//! ```

use std::any::Any;
use std::collections::VecDeque;

use burn::tensor::backend::Backend;
use burn::tensor::{BasicOps, DType, Int, Tensor, TensorData, TensorKind};
use burn::train::{
    ClassificationOutput, ItemLazy, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};
use burn_backend::Bytes;
use burn_ddp_comm::{Error, ErrorKind, Result};

/// Output of a step that can be joined with those of other ranks. Burn's four outputs implement it.
///
/// An output of your own gives its tensors in [`parts`](Self::parts), in any fixed order, and takes the joined tensors
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
///
/// An output without an implementation is a compile error that names this trait:
///
/// ```compile_fail,E0277
/// use burn_ddp::learner::DdpOutput;
///
/// struct Scores(Vec<f32>);
///
/// fn gather<O: DdpOutput>(_: O) {}
/// gather(Scores(vec![0.5]));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be gathered from all ranks: it does not implement `DdpOutput`",
    label = "the output of this learner's model",
    note = "implement `burn_ddp::learner::DdpOutput` for it (items, parts, join); training and validation both need it"
)]
pub trait DdpOutput: ItemLazy + Sized {
    /// Number of items of the batch.
    fn items(&self) -> usize;

    /// True if [`weight`](Self::weight) is always the number of items of the batch as its loader counts them; default
    /// `false`. The weight is then known before the step, without which no gradient can be sent during the backward
    /// pass (feature `overlap`). It is true for Burn's outputs except `SequenceOutput`. Set it for an output of your
    /// own that keeps the default `weight` and whose batcher makes one row of each item.
    const WEIGHT_IS_ITEMS: bool = false;

    /// Weight of the loss and the gradients among those of other ranks and micro-steps: the number of items (or tokens)
    /// over which the loss is a mean. Default [`items`](Self::items).
    fn weight(&self) -> f64 {
        self.items() as f64
    }

    /// Copies loss and tensors to host memory.
    fn parts(self) -> Parts;

    /// Makes the output of the global batch from the parts of all ranks.
    ///
    /// # Errors
    /// If the parts do not fit together.
    fn join(parts: GlobalParts) -> Result<Self>;

    /// Does the same as [`join`](Self::join) with the parts of this output alone, for a world of one. Override it to
    /// avoid the copy to the host.
    ///
    /// # Errors
    /// Those of [`join`](Self::join).
    fn alone(self) -> Result<Self> {
        let (items, weight) = (self.items(), self.weight());
        let mut parts = self.parts();
        let device = parts.device.take();
        Self::join(GlobalParts::new(vec![RankOutput { items, weight, parts }], false, device)?)
    }
}

/// A device of any backend: [`Parts`] has no backend type.
pub(super) type AnyDevice = Box<dyn Any + Send + Sync>;

/// Loss and tensors of one rank's output, in host memory.
#[derive(Debug, Default)]
pub struct Parts {
    pub(super) loss: Option<f64>,
    pub(super) tensors: Vec<TensorData>,
    /// Device of the first tensor, on which a world of one joins.
    pub(super) device: Option<AnyDevice>,
}

impl Parts {
    /// No loss and no tensors.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the loss: the mean of the elements of `loss`.
    pub fn with_loss<B: Backend>(mut self, loss: Tensor<B, 1>) -> Self {
        self.device.get_or_insert_with(|| Box::new(loss.device()));
        let values: Vec<f64> = loss.into_data().iter::<f64>().collect();
        Self { loss: Some(values.iter().sum::<f64>() / values.len() as f64), ..self }
    }

    /// Adds a tensor of shape `[items, ..]`.
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

/// Output of one rank's share of a global batch.
#[derive(Debug)]
pub(super) struct RankOutput {
    pub(super) items: usize,
    pub(super) weight: f64,
    pub(super) parts: Parts,
}

/// The parts of all ranks that had items, in rank order, which is the order of the items in the global batch.
#[derive(Debug)]
pub struct GlobalParts {
    items: usize,
    loss: Option<f64>,
    /// For each position in [`Parts`], the tensors of all ranks.
    tensors: VecDeque<Vec<TensorData>>,
    loss_only: bool,
    device: Option<AnyDevice>,
}

impl GlobalParts {
    /// Takes the `outputs` of all ranks, to be joined on `device`.
    pub(super) fn new(outputs: Vec<RankOutput>, loss_only: bool, device: Option<AnyDevice>) -> Result<Self> {
        let disagree = |what: &str| {
            Error::new(ErrorKind::Mismatch, format!("ranks returned outputs of different {what}"))
        };
        let with_loss = outputs.iter().filter(|output| output.parts.loss.is_some()).count();
        if with_loss != 0 && with_loss != outputs.len() {
            return Err(disagree("form: some have a loss and some do not"));
        }
        let weight: f64 = outputs.iter().map(|output| output.weight).sum();
        // An output of weight 0 is left out, as in the gradient: its loss, a mean over nothing, is NaN.
        let counted = outputs.iter().filter(|output| output.weight != 0.0);
        let loss = counted.filter_map(|output| Some(output.parts.loss? * output.weight)).sum::<f64>();
        let loss = (with_loss > 0).then_some(loss / weight);
        let items = outputs.iter().map(|output| output.items).sum();
        let count = outputs.first().map_or(0, |output| output.parts.tensors.len());
        let mut tensors: VecDeque<Vec<TensorData>> = (0..count).map(|_| Vec::new()).collect();
        for output in outputs {
            if output.parts.tensors.len() != count && !loss_only {
                return Err(disagree("numbers of tensors"));
            }
            tensors.iter_mut().zip(output.parts.tensors).for_each(|(all, one)| all.push(one));
        }
        Ok(Self { items, loss, tensors, loss_only, device })
    }

    /// Device on which the parts are joined. A `join` to another backend than the rank's uses the default device of
    /// that.
    fn device<B: Backend>(&self) -> B::Device {
        self.device.as_ref().and_then(|device| device.downcast_ref()).cloned().unwrap_or_default()
    }

    /// Number of items of the global batch.
    pub fn items(&self) -> usize {
        self.items
    }

    /// True if the outputs exceeded [`DdpStrategy::with_output_limit`](super::DdpStrategy::with_output_limit). Then
    /// [`cat`](Self::cat) returns tensors without items, and only metrics that need nothing but the loss are permitted.
    pub fn loss_only(&self) -> bool {
        self.loss_only
    }

    /// Returns the mean loss of the global batch once for each item, shape `[items]`: metrics that count its elements
    /// then weigh batches by their items.
    ///
    /// # Errors
    /// If the parts had no loss.
    pub fn loss<B: Backend>(&self) -> Result<Tensor<B, 1>> {
        let loss = self.loss.ok_or_else(|| {
            Error::config("join asks for the loss, but parts gave none: call `Parts::with_loss`")
        })?;
        Ok(Tensor::full([self.items], loss, &self.device::<B>()))
    }

    /// Takes the next tensor of all ranks, joined along the first dimension.
    ///
    /// # Errors
    /// If the other dimensions or the dtypes differ, which the error names, or if there is no further tensor.
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

    /// Takes the next tensor of each rank, for outputs that are not joined along the first dimension.
    ///
    /// # Errors
    /// If there is no further tensor, or if the outputs were too large to be gathered ([`loss_only`](Self::loss_only)).
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

/// Joins `all` along the first dimension, for which row-major memory is concatenated.
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

/// Concatenates `pieces` in memory that is aligned for elements of `dtype`.
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

/// Repeats the mean of `loss` for each item, on its device.
fn per_item<B: Backend>(loss: Tensor<B, 1>, items: usize) -> Tensor<B, 1> {
    loss.mean().expand([items])
}

/// Implements [`DdpOutput`] for Burn's outputs of a loss, an output and targets with one row for each item.
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

/// The weight is the number of tokens, over which Burn's sequence losses are a mean; padding counts as tokens.
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
        let output =
            |loss, weight| RankOutput { items: 2, weight, parts: Parts { loss: Some(loss), ..Parts::new() } };
        let loss = |outputs| GlobalParts::new(outputs, false, None).map(|parts| parts.loss);
        // The mean over no tokens is no number.
        assert_eq!(
            loss(vec![output(1.0, 3.0), output(f64::NAN, 0.0), output(5.0, 1.0)]).expect("fits"),
            Some(2.0)
        );
        assert!(loss(vec![output(f64::NAN, 1.0), output(1.0, 1.0)]).expect("fits").is_some_and(f64::is_nan));
    }

    #[test]
    fn outputs_are_joined_where_the_rank_is() {
        use burn_dispatch::{Dispatch, DispatchDevice};
        let elsewhere = DispatchDevice::NdArray(Default::default());
        assert_ne!(elsewhere, DispatchDevice::default());
        let tensor = Tensor::<Dispatch, 1>::ones([2], &elsewhere);
        let mut parts = Parts::new().with_loss(tensor.clone().mean()).with(tensor);
        let device = parts.device.take();
        let output = RankOutput { items: 2, weight: 2.0, parts };
        let mut joined = GlobalParts::new(vec![output], false, device).expect("fits");
        assert_eq!(joined.loss::<Dispatch>().expect("a loss").device(), elsewhere);
        assert_eq!(joined.cat::<Dispatch, 1, burn::tensor::Float>().expect("a tensor").device(), elsewhere);
        let mut other = GlobalParts::new(vec![], false, Some(Box::new(elsewhere))).expect("fits");
        other.loss_only = true;
        other
            .cat::<burn_flex::Flex, 1, burn::tensor::Float>()
            .expect("another backend has a device of its own");
    }
}
