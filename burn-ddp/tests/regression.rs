//! One test for each bug that was found, from the first on. Add a line here before you mend anything.

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use burn_autodiff::Autodiff;
use burn_ddp::{Ddp, ProcessGroup, Rank, ReduceOp, Replica, ReplicaOptions, Result};
use burn_flex::Flex;

use crate::harness::{Case, Launch, ROADS};

pub const CASES: &[(&str, Case)] = &[("bucket size", bucket_size), ("own all_reduce", own_all_reduce)];

type B = Autodiff<Ddp<Flex>>;

#[derive(Module, Debug)]
struct Ten<B: Backend> {
    params: Vec<Param<Tensor<B, 1>>>,
}

/// Reduces the same random gradients with three bucket sizes and says a hash of each result's bits.
fn bucket_size() -> Result<String> {
    let group = ProcessGroup::<Ddp<Flex>>::from_env(&Default::default())?;
    let device = group.device();
    let mut results = Vec::new();
    for bytes in [1 << 10, 64 << 10, 1 << 30] {
        let size = |index: usize| if index == 0 { 1007 } else { 1000 };
        let params =
            (0..10).map(|index| Param::from_tensor(Tensor::<B, 1>::zeros([size(index)], device))).collect();
        let options = ReplicaOptions::new().with_bucket_bytes(bytes);
        let (model, mut replica) = Replica::new(Ten { params }, &group, options)?;
        B::seed(device, 11 + group.rank().0 as u64);
        let loss = model
            .params
            .iter()
            .map(|param| (param.val() * Tensor::random(param.shape(), Distribution::Default, device)).sum())
            .reduce(|a, b| a + b)
            .expect("ten");
        let reduced = replica.reduce(&model, GradientsParams::from_grads(loss.backward(), &model))?;
        let bits = model.params.iter().flat_map(|param| {
            let gradient = reduced.grads.get::<Ddp<Flex>, 1>(param.id).expect("a gradient");
            gradient.into_data().to_vec::<f32>().expect("floats").into_iter().map(f32::to_bits)
        });
        results.push(bits.fold(0u64, |hash, bits| (hash ^ u64::from(bits)).wrapping_mul(0x0100_0000_01b3)));
    }
    Ok(format!("{results:?}"))
}

/// pytorch/pytorch#30509: the bits changed with the bucket size.
#[test]
fn neither_the_bucket_size_nor_the_road_changes_the_bits() {
    let mut all = Vec::new();
    for road in ROADS {
        for rank in Launch::new("bucket size", 4).over(road).succeed() {
            all.extend(rank.trim_matches(['[', ']']).split(", ").map(str::to_owned));
        }
    }
    // Three sizes, on four ranks, over three roads.
    assert!(all.len() == 36 && all.iter().all(|hash| *hash == all[0]), "{all:?}");
}

/// Rank 1 reduces a tensor of its own where rank 0 reduces a bucket of as many elements.
fn own_all_reduce() -> Result<String> {
    let group = ProcessGroup::<Ddp<Flex>>::from_env(&Default::default())?;
    let ones = |count: usize| Tensor::<B, 1>::ones([count], group.device());
    let params = vec![Param::from_tensor(ones(7)), Param::from_tensor(ones(8))];
    let options = ReplicaOptions::new().with_bucket_bytes(1);
    let (model, mut replica) = Replica::new(Ten { params }, &group, options)?;
    if group.rank() == Rank(1) {
        let count = replica.plan().buckets[0].bytes / size_of::<f32>();
        return group.all_reduce(ones(count).inner(), ReduceOp::Mean).wait().map(|sum| format!("{sum}"));
    }
    let loss = model.params[0].val().sum() + model.params[1].val().sum();
    replica.reduce(&model, GradientsParams::from_grads(loss.backward(), &model))?;
    Ok("reduced".into())
}

/// Sums of a bucket and of what the program itself reduced looked right.
#[test]
fn a_bucket_meets_no_collective_of_the_programs_own() {
    for road in ROADS {
        for outcome in Launch::new("own all_reduce", 2).over(road).run() {
            outcome.failed_saying(&["different operations", "all_reduce of gradients #", "all_reduce #"]);
        }
    }
}
