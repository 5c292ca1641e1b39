//! Marks on parameters, of which Burn's backward pass informs `backend/hook.rs`.
//!
//! A mark holds for one backward pass, and only for tensors that were marked before the forward pass. It stays with a
//! parameter over optimizer steps if the parameter itself was mapped to a marked tensor (`burn-optim/distributed`). A
//! visit marks the graph's leaf once more and changes neither bits nor memory. `fork`, `to_device` and a loaded record
//! lose the mark, and with it overlap and nothing else, unless the pass reaches another replica's model too: that one
//! then takes the pass for its own alone, which is an error if it is not handed these gradients. A second backward pass
//! between two optimizer steps finds no mark either.

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Tensor, TensorPrimitive};

/// Marks every trained parameter; Burn's optimizers keep these marks.
pub(super) fn mark_for_all_steps<B: AutodiffBackend, M: AutodiffModule<B>>(model: M) -> M {
    model.map(&mut SetMarks)
}

/// Marks every trained parameter for the next backward pass.
pub(super) fn mark_for_next_backward<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) {
    model.visit(&mut SetMarks);
}

struct SetMarks;

/// The tensor of `param` with a mark; `None` if it is not trained or quantized.
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

impl<B: AutodiffBackend> ModuleVisitor<B> for SetMarks {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        drop(mark(param));
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for SetMarks {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        match mark(&param) {
            Some(marked) => Param::from_mapped_value(param.id, marked, param.consume().2),
            None => param,
        }
    }
}
