//! The parameters of a model as a list in visit order.
//!
//! Order across ranks is module visit order, never id order: ids are random per process. Burn initializes
//! parameters lazily and then draws their values from the backend's random stream. So a world of one only
//! [`describe`]s its model, and draws nothing that a plain program would not draw, while ranks that are about to be
//! made equal [`collect`] theirs, which initializes all parameters.

use std::collections::BTreeMap;

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, Element, Float, Int, Tensor};
use burn_ddp_comm::{DType, Error, Result};

use crate::bucket::{ParamRole, ParamSpec};
use crate::communicator::{AnyTensor, wire_dtype};
use crate::process_group::GroupKind;

/// One parameter of a model.
pub(crate) struct ParamValue<B: Backend> {
    pub(crate) id: ParamId,
    pub(crate) spec: ParamSpec,
    /// `None` while it is not initialized.
    pub(crate) tensor: Option<AnyTensor<B>>,
}

/// All parameters of `model` with their values on the inner backend, in visit order; initializes those that are
/// not yet.
///
/// # Errors
/// Names the parameter whose element type cannot be sent.
pub(crate) fn collect<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
) -> Result<Vec<ParamValue<B::InnerBackend>>> {
    model.visit(&mut Initialize);
    // Writes pending updates of running states, without which their visit is one step stale.
    let _ = model.valid();
    let (params, unsendable) = visit::<B, M>(model);
    unsendable.map_or(Ok(params), Err)
}

/// All parameters of `model` in visit order, without initializing any.
pub(crate) fn describe<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
) -> Vec<ParamValue<B::InnerBackend>> {
    visit::<B, M>(model).0
}

/// The parameters, and the first reason why one of them cannot be sent.
fn visit<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
) -> (Vec<ParamValue<B::InnerBackend>>, Option<Error>) {
    let mut visitor = CollectParameters::<B> {
        path: Vec::new(),
        found: Vec::new(),
        failed: None,
        states: running_states(model).into_iter(),
    };
    model.visit(&mut visitor);
    (visitor.found, visitor.failed)
}

/// The ids of all parameters in visit order, without touching their values.
pub(crate) fn ids<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Vec<ParamId> {
    let mut ids = Ids::default();
    model.visit(&mut ids);
    ids.all
}

/// `model` with other values and ids, both in the order of [`collect`]; a running state keeps its id.
///
/// # Errors
/// Fewer values than parameters, or a value of another kind.
pub(crate) fn replace<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: M,
    values: Vec<(ParamId, AnyTensor<B::InnerBackend>)>,
) -> Result<M> {
    let mut mapper = ReplaceValues::<B> { values: values.into_iter(), failed: None };
    let model = model.map(&mut mapper);
    match mapper.failed {
        Some(error) => Err(error),
        None => Ok(model),
    }
}

/// The running states among all parameters of `model`, after pending updates, with their positions in visit order.
///
/// # Errors
/// Names the parameter whose element type cannot be sent.
pub(crate) fn states<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
) -> Result<Vec<(usize, ParamValue<B::InnerBackend>)>> {
    let mut all: Vec<_> = collect::<B, M>(model)?.into_iter().enumerate().collect();
    all.retain(|(_, param)| param.spec.role == ParamRole::RunningState);
    Ok(all)
}

/// Sets running states of `model`, by position among all parameters in visit order. A running state shares its value
/// with its clones, so a reference to the model suffices. Pending updates, which [`collect`] writes, would overwrite
/// the values set here.
///
/// # Errors
/// A value that is no float tensor.
pub(crate) fn set_running_states<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
    values: BTreeMap<usize, AnyTensor<B::InnerBackend>>,
) -> Result<()> {
    let mut mapper = SetStates::<B> { position: 0, values, failed: None };
    let _ = model.clone().map(&mut mapper);
    mapper.failed.map_or(Ok(()), Err)
}

struct SetStates<B: AutodiffBackend> {
    position: usize,
    values: BTreeMap<usize, AnyTensor<B::InnerBackend>>,
    failed: Option<Error>,
}

impl<B: AutodiffBackend> SetStates<B> {
    fn next(&mut self) -> Option<AnyTensor<B::InnerBackend>> {
        let value = self.values.remove(&self.position);
        self.position += 1;
        value
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for SetStates<B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(value) = self.next() else { return param };
        match Float::from_any(value) {
            Ok(value) => {
                let value = Tensor::from_inner(Tensor::from_primitive(value));
                Param::from_mapped_value(param.id, value, param.consume().2)
            }
            Err(error) => {
                self.failed.get_or_insert(error);
                param
            }
        }
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        self.position += 1;
        param
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        self.position += 1;
        param
    }
}

/// Initializes all parameters.
struct Initialize;

impl<B: Backend> ModuleVisitor<B> for Initialize {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        param.val();
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        param.val();
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        param.val();
    }
}

#[derive(Default)]
struct Ids {
    all: Vec<ParamId>,
    float: Vec<ParamId>,
}

impl<B: Backend> ModuleVisitor<B> for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.all.push(param.id);
        self.float.push(param.id);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.all.push(param.id);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.all.push(param.id);
    }
}

/// By position among float parameters, whether one is a running state. A mapper can change the id of every parameter
/// but that of a running state, whose shared value is set to itself here.
fn running_states<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Vec<bool> {
    struct NewIds;
    impl<B: Backend> ModuleMapper<B> for NewIds {
        fn map_float<const D: usize>(&mut self, mut param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            param.id = ParamId::new();
            param
        }

        // Unchanged: the default implementation would initialize them.
        fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
            param
        }

        fn map_bool<const D: usize>(
            &mut self,
            param: Param<Tensor<B, D, Bool>>,
        ) -> Param<Tensor<B, D, Bool>> {
            param
        }
    }
    let (mut before, mut after) = (Ids::default(), Ids::default());
    model.visit(&mut before);
    model.clone().map(&mut NewIds).visit(&mut after);
    before.float.iter().zip(&after.float).map(|(before, after)| before == after).collect()
}

struct CollectParameters<B: AutodiffBackend> {
    path: Vec<String>,
    found: Vec<ParamValue<B::InnerBackend>>,
    failed: Option<Error>,
    /// For each float parameter in visit order, whether it is a running state.
    states: std::vec::IntoIter<bool>,
}

impl<B: AutodiffBackend> CollectParameters<B> {
    fn push(
        &mut self,
        id: ParamId,
        shape: Vec<usize>,
        element: burn::tensor::DType,
        role: ParamRole,
        tensor: Option<AnyTensor<B::InnerBackend>>,
    ) {
        let path = self.path.join(".");
        let dtype = wire_dtype(element).unwrap_or_else(|error| {
            self.failed.get_or_insert_with(|| error.context(format!("parameter `{path}`")));
            DType::U8
        });
        self.found.push(ParamValue { id, spec: ParamSpec { path, shape, dtype, role }, tensor });
    }
}

impl<B: AutodiffBackend> ModuleVisitor<B> for CollectParameters<B> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let is_state = self.states.next().unwrap_or(false);
        if !param.is_initialized() {
            let shape = param.lazy_shape().to_vec();
            return self.push(param.id, shape, B::FloatElem::dtype(), ParamRole::Trained, None);
        }
        let tensor = param.val();
        let role = match (is_state, tensor.is_require_grad()) {
            (true, _) => ParamRole::RunningState,
            (_, true) => ParamRole::Trained,
            (_, false) => ParamRole::Frozen,
        };
        // The stored type, before quantized values are made floats.
        let element = tensor.dtype();
        let tensor = Float::into_any(tensor.inner().into_primitive());
        self.push(param.id, tensor.shape(), element, role, Some(tensor));
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        let tensor = param.is_initialized().then(|| Int::into_any(param.val().inner().into_primitive()));
        let element = tensor.as_ref().map_or(B::IntElem::dtype(), AnyTensor::dtype);
        self.push(param.id, param.lazy_shape().to_vec(), element, ParamRole::Constant, tensor);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        let tensor = param.is_initialized().then(|| Bool::into_any(param.val().inner().into_primitive()));
        let element = tensor.as_ref().map_or(B::BoolElem::dtype(), AnyTensor::dtype);
        self.push(param.id, param.lazy_shape().to_vec(), element, ParamRole::Constant, tensor);
    }
}

struct ReplaceValues<B: AutodiffBackend> {
    values: std::vec::IntoIter<(ParamId, AnyTensor<B::InnerBackend>)>,
    failed: Option<Error>,
}

impl<B: AutodiffBackend> ReplaceValues<B> {
    fn next<K: GroupKind<B::InnerBackend>>(&mut self) -> Option<(ParamId, K::Primitive)> {
        let next =
            self.values.next().ok_or_else(|| Error::config("the model has more parameters than values"));
        match next.and_then(|(id, tensor)| Ok((id, K::from_any(tensor)?))) {
            Ok(next) => Some(next),
            Err(error) => {
                self.failed.get_or_insert(error);
                None
            }
        }
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for ReplaceValues<B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some((id, value)) = self.next::<Float>() else { return param };
        let (_, old, mapper) = param.consume();
        let value = Tensor::from_inner(Tensor::from_primitive(value)).set_require_grad(old.is_require_grad());
        Param::from_mapped_value(id, value, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        let Some((id, value)) = self.next::<Int>() else { return param };
        let (_, _, mapper) = param.consume();
        Param::from_mapped_value(id, Tensor::from_inner(Tensor::from_primitive(value)), mapper)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        let Some((id, value)) = self.next::<Bool>() else { return param };
        let (_, _, mapper) = param.consume();
        Param::from_mapped_value(id, Tensor::from_inner(Tensor::from_primitive(value)), mapper)
    }
}
