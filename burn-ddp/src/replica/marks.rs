//! Marks, by which Burn's backward pass tells `backend/hook.rs` of a parameter.
//!
//! A mark holds for one backward pass, and only for tensors that were marked before the forward pass. It stays with a
//! parameter over optimizer steps if the parameter itself was mapped to a marked tensor (`burn-optim/distributed`);
//! a visit marks the graph's leaf once more and costs neither bits nor memory. What loses it (`fork`, `to_device`, a
//! record that is loaded) loses overlap and nothing else, unless the pass reaches another replica's model too: that one
//! takes the pass for its own alone, which is an error if its gradients are not handed over. A second backward pass
//! between two optimizer steps finds no mark either.

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorPrimitive};

/// `model` with every trained parameter marked.
pub(super) fn map<B: AutodiffBackend, M: AutodiffModule<B>>(model: M) -> M {
    model.map(&mut Mark)
}

/// Marks every trained parameter for the next backward pass.
pub(super) fn visit<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) {
    model.visit(&mut Mark);
}

struct Mark;

/// The marked tensor; nothing if it is not trained or not of floats.
fn mark<B: AutodiffBackend, const D: usize>(param: &Param<Tensor<B, D>>) -> Option<Tensor<B, D>> {
    // Reading a lazy parameter would initialize it.
    if !param.is_initialized() {
        return None;
    }
    let tensor = param.val();
    if !tensor.is_require_grad() {
        return None;
    }
    match tensor.into_primitive() {
        TensorPrimitive::Float(tensor) => {
            let marked = B::set_distributed_params(tensor, param.id.val().into());
            Some(Tensor::from_primitive(TensorPrimitive::Float(marked)))
        }
        TensorPrimitive::QFloat(_) => None,
    }
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Mark {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        drop(mark(param));
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for Mark {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        match mark(&param) {
            Some(marked) => Param::from_mapped_value(param.id, marked, param.consume().2),
            None => param,
        }
    }
}
