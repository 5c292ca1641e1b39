//! Gradients with known values, and their comparison.

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorData};
use burn_ddp::{Error, ErrorKind, ProcessGroup, ReduceOp, Result};

/// Ids and shapes of all float parameters of a model, in visit order.
#[derive(Clone, Debug, Default)]
pub struct Parameters(Vec<(ParamId, Vec<usize>)>);

impl<B: AutodiffBackend> ModuleVisitor<B> for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.push((param.id, param.val().dims().to_vec()));
    }
}

impl Parameters {
    /// The parameters of `model`, which are initialized now if they have not been.
    pub fn of<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Self {
        let mut parameters = Self::default();
        model.visit(&mut parameters);
        parameters
    }

    /// Bytes of all parameters in f32.
    pub fn bytes(&self) -> usize {
        self.0.iter().map(|(_, shape)| shape.iter().product::<usize>() * size_of::<f32>()).sum()
    }

    /// A gradient for each parameter; its elements are `value(parameter, element)`.
    pub fn gradients<B: AutodiffBackend>(
        &self,
        device: &B::Device,
        value: impl Fn(usize, usize) -> f32,
    ) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        for (position, (id, shape)) in self.0.iter().enumerate() {
            let elements = shape.iter().product();
            let values: Vec<f32> = (0..elements).map(|element| value(position, element)).collect();
            // The number of dimensions is part of a tensor's type but not of how gradients are kept.
            let tensor = Tensor::<B::InnerBackend, 1>::from_data(TensorData::new(values, [elements]), device);
            match shape.len() {
                1 => gradients.register(*id, tensor),
                2 => gradients.register(*id, tensor.reshape([shape[0], shape[1]])),
                more => panic!("a parameter of {more} dimensions"),
            }
        }
        gradients
    }

    /// The values of every gradient, in order.
    fn values<B: AutodiffBackend>(&self, gradients: &GradientsParams) -> Result<Vec<Vec<f32>>> {
        let values = |(id, shape): &(ParamId, Vec<usize>)| {
            let data = match shape.len() {
                1 => gradients.get::<B::InnerBackend, 1>(*id).map(Tensor::into_data),
                _ => gradients.get::<B::InnerBackend, 2>(*id).map(Tensor::into_data),
            };
            let values = data.and_then(|data| data.to_vec::<f32>().ok());
            values
                .ok_or_else(|| Error::new(ErrorKind::Diverged, format!("parameter {id} has no f32 gradient")))
        };
        self.0.iter().map(values).collect()
    }

    /// Checks that the elements of `reduced` are `value(parameter, element)`.
    ///
    /// # Errors
    /// `Diverged` with the first element that differs.
    pub fn check<B: AutodiffBackend>(
        &self,
        reduced: &GradientsParams,
        value: impl Fn(usize, usize) -> f32,
    ) -> Result<()> {
        for (parameter, got) in self.values::<B>(reduced)?.into_iter().enumerate() {
            let wrong = got.iter().enumerate().find(|(element, got)| value(parameter, *element) != **got);
            if let Some((element, got)) = wrong {
                let expected = value(parameter, element);
                let message = format!("element {element} of gradient {parameter} is {got}, not {expected}");
                return Err(Error::new(ErrorKind::Diverged, message));
            }
        }
        Ok(())
    }

    /// Compares `reduced` with the mean over all ranks of `mine`, the gradients of this rank alone; one collective for
    /// each gradient computes that mean. All ranks must call it.
    ///
    /// # Errors
    /// `Diverged` with the first gradient whose difference is more than rounding.
    pub fn check_mean<B: AutodiffBackend>(
        &self,
        group: &ProcessGroup<B::InnerBackend>,
        mine: &GradientsParams,
        reduced: &GradientsParams,
    ) -> Result<()> {
        let device = group.device();
        let pairs = self.values::<B>(mine)?.into_iter().zip(self.values::<B>(reduced)?);
        for (parameter, (mine, reduced)) in pairs.enumerate() {
            let length = mine.len();
            let mine = Tensor::<B::InnerBackend, 1>::from_data(TensorData::new(mine, [length]), device);
            let mean = group.all_reduce(mine, ReduceOp::Mean).wait()?.into_data().to_vec::<f32>();
            let mean = mean.map_err(|error| Error::config(format!("gradients are f32: {error:?}")))?;
            let largest = mean.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
            let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * largest;
            if mean.len() != reduced.len() || !mean.iter().zip(&reduced).all(near) {
                let message = format!("gradient {parameter} is not the mean over all ranks");
                return Err(Error::new(ErrorKind::Diverged, message));
            }
        }
        Ok(())
    }
}
