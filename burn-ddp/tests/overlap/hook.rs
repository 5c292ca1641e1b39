//! The hook leaves training without a replica as it is, and Burn's in-process data parallelism is refused.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Autodiff;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::distributed::{
    DistributedBackend, DistributedConfig, DistributedParamId, ReduceOperation, get_distributed_sync_client,
};
use burn_ddp::Ddp;
use burn_flex::Flex;
use burn_ndarray::NdArray;

use crate::training::{Model, exclusive, train};

const STEPS: usize = 4;

/// Marks every parameter it visits and counts them.
#[derive(Default)]
struct Mark {
    marked: usize,
}

impl<B: AutodiffBackend> ModuleMapper<B> for Mark {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let primitive = tensor.into_primitive().tensor();
        let primitive = B::set_distributed_params(primitive, DistributedParamId::from(id.val()));
        assert!(B::is_distributed(&primitive), "the mark did not take");
        self.marked += 1;
        Param::from_mapped_value(id, Tensor::from_primitive(TensorPrimitive::Float(primitive)), mapper)
    }
}

fn marking_changes_nothing<B: AutodiffBackend>() {
    let _exclusive = exclusive();
    let marks = Cell::new(0);
    let unmarked = train::<B>(23, STEPS, |model| model);
    let marked = train::<B>(23, STEPS, |model: Model<B>| {
        let mut mark = Mark::default();
        let model = model.map(&mut mark);
        marks.set(marks.get() + mark.marked);
        model
    });
    unmarked.assert_equal(&marked);
    let gradients = marked.labels().filter(|label| *label == "gradient").count();
    assert_eq!(marks.get(), gradients, "each parameter is marked and has a gradient in each step");

    let losses = unmarked.floats("loss");
    assert!(losses.iter().all(|loss| loss.is_finite()) && losses[0] != losses[STEPS - 1], "{losses:?}");
}

#[test]
fn marking_changes_nothing_on_flex() {
    marking_changes_nothing::<Autodiff<Ddp<Flex>>>();
}

#[test]
fn marking_changes_nothing_on_ndarray() {
    marking_changes_nothing::<Autodiff<Ddp<NdArray<f32>>>>();
}

fn refusal(call: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(call)).expect_err("the call must be refused");
    *payload.downcast::<String>().expect("a formatted message")
}

// `ExecutionStrategy::ddp` makes these calls before its first step, on the backend the model is generic over.
#[test]
fn the_in_process_server_is_refused_by_name() {
    type Training = Autodiff<Ddp<Flex>>;
    let devices = [Default::default(), Default::default()];
    let config = DistributedConfig { all_reduce_op: ReduceOperation::Mean };

    let message = refusal(|| Training::start_communication_server(&devices, config));
    for word in
        ["start_communication_server", "ExecutionStrategy::ddp", "`DdpStrategy`", "`Replica`", "burnrun"]
    {
        assert!(message.contains(word), "{word} is missing in: {message}");
    }
    assert!(get_distributed_sync_client::<Ddp<Flex>>().is_none(), "a server runs in spite of the refusal");
    Training::close_communication_server(&devices[0]);
}

#[test]
fn collectives_between_devices_of_one_process_are_refused() {
    let device = Default::default();
    let tensor = Tensor::<Ddp<Flex>, 1>::ones([3], &device).into_primitive().tensor();
    let message = refusal(|| {
        Ddp::<Flex>::all_reduce(tensor, ReduceOperation::Sum, Vec::new());
    });
    assert!(message.contains("all_reduce") && message.contains("`Replica`"), "{message}");
    let message = refusal(|| Ddp::<Flex>::sync_collective(&device));
    assert!(message.contains("sync_collective") && message.contains("`Replica`"), "{message}");
    assert_eq!(Ddp::<Flex>::name(&device), "ddp<flex>");
}
