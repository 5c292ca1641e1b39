//! Process groups over Burn's tensors: NCCL's results must equal those through host memory, bit for bit.
//!
//! With several ranks values are small whole numbers, since NCCL's order of summation is its own; in a world of one
//! they have fractions.

use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, Float, Int, Tensor, TensorData};
use burn_cubecl::CubeBackend;
use burn_cuda::{Cuda, CudaDevice};
use burn_ddp::communicator::AnyTensor;
use burn_ddp::process_group::GroupKind;
use burn_ddp::{CommunicatorKind, Ddp, Error, ErrorKind, GroupOptions, ProcessGroup, Rank, ReduceOp, Result};
use burn_ddp_nccl::{NcclBackend, process_group_with};
use cubecl::cuda::CudaRuntime;

use crate::Machine;
use crate::report::Report;

/// Burn's CUDA backend without fusion; `Cuda` has it.
pub(crate) type Plain = CubeBackend<CudaRuntime, f32, i32, u8>;

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Mean];
const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
const INTS: [DType; 3] = [DType::I32, DType::I64, DType::U8];
/// Below, above and at multiples of 512 bytes; the rows of some are padded on the device.
const SHAPES: [[usize; 2]; 6] = [[1, 1], [3, 5], [33, 129], [16, 512], [1, 100_003], [257, 1]];

pub(crate) fn check(machine: &Machine, report: &mut Report) -> Result<()> {
    backend::<Ddp<Cuda>>("with fusion", 0, machine, report)?;
    backend::<Ddp<Plain>>("without fusion", 2, machine, report)
}

fn backend<B: NcclBackend<Device = CudaDevice>>(
    name: &str,
    number: u16,
    machine: &Machine,
    report: &mut Report,
) -> Result<()> {
    let nccl = results(&connected::<B>(machine, CommunicatorKind::Nccl, number)?)?;
    let host = results(&connected::<B>(machine, CommunicatorKind::Host, number + 1)?)?;
    for ((what, nccl), (_, host)) in nccl.into_iter().zip(host) {
        let different = nccl.iter().zip(&host).position(|(nccl, host)| nccl != host);
        let outcome = match different {
            None if nccl.len() == host.len() => Ok(format!("{} results equal", nccl.len())),
            None => Err(format!("{} results by NCCL, {} by the host", nccl.len(), host.len())),
            Some(at) => Err(format!("result {at}: {} by NCCL, {} by the host", nccl[at], host[at])),
        };
        report.line(&format!("{what} {name}"), outcome);
    }
    Ok(())
}

/// A group that uses the communicator `kind` in a world of one too. Each group of one run needs a port, so each has a
/// `number` of its own.
pub(crate) fn connected<B: NcclBackend<Device = CudaDevice>>(
    machine: &Machine,
    kind: CommunicatorKind,
    number: u16,
) -> Result<ProcessGroup<B>> {
    let (mut info, mut options) = (machine.info.clone(), GroupOptions::from_env()?);
    (options.communicator, options.connect_alone) = (kind, true);
    if let Some((_, port)) = &mut info.master {
        *port += number;
    }
    process_group_with(info, options, &machine.device)
}

type Results = Vec<(String, Vec<TensorData>)>;

fn results<B: Backend>(group: &ProcessGroup<B>) -> Result<Results> {
    let mut results = Vec::new();
    for dtype in FLOATS {
        results.push((format!("{dtype:?}"), of_kind::<B, Float>(group, dtype)?));
    }
    for dtype in INTS {
        results.push((format!("{dtype:?}"), of_kind::<B, Int>(group, dtype)?));
    }
    let data = values::<B>(group, [33, 129], DType::I32).convert::<i32>();
    let tensor = Tensor::<B, 2, Int>::from_data(data, group.device()).greater_elem(0);
    let tensor: Tensor<B, 2, Bool> = group.broadcast(tensor, Rank(0)).wait()?;
    results.push(("Bool".into(), vec![read(tensor)?]));
    Ok(results)
}

/// The results of all collectives over tensors of `dtype`.
fn of_kind<B: Backend, K: GroupKind<B>>(group: &ProcessGroup<B>, dtype: DType) -> Result<Vec<TensorData>> {
    let tensor =
        |shape| Tensor::<B, 2, K>::from_data(values::<B>(group, shape, dtype), (group.device(), dtype));
    let list = || SHAPES.map(|shape| K::into_any(tensor(shape).into_primitive())).to_vec();
    let back = |tensors: Vec<AnyTensor<B>>| {
        let read = |tensor| read(Tensor::<B, 2, K>::from_primitive(K::from_any(tensor)?));
        tensors.into_iter().map(read).collect::<Result<Vec<_>>>()
    };
    let mut results = Vec::new();
    // NCCL's mean multiplies by 1/n, the host's divides by n: the same for powers of two.
    let ops = if group.world_size().is_power_of_two() { &OPS[..] } else { &OPS[..3] };
    for &op in ops {
        for shape in SHAPES {
            results.push(read(group.all_reduce(tensor(shape), op).wait()?)?);
            let flat = tensor(shape).reshape([shape[0] * shape[1]]);
            results.push(read(group.reduce_scatter::<K>(flat, op).wait()?)?);
        }
        results.extend(back(group.all_reduce_list(list(), op).wait()?)?);
    }
    let last = Rank(group.world_size() - 1);
    for shape in SHAPES {
        results.push(read(group.broadcast(tensor(shape), last).wait()?)?);
        results.push(read(group.all_gather(tensor(shape)).wait()?)?);
    }
    results.extend(back(group.broadcast_list(list(), last).wait()?)?);
    // Columns of a larger matrix, which are a view.
    let slice = tensor([33, 129]).slice([1..30, 7..101]);
    results.push(read(group.all_reduce(slice, ReduceOp::Sum).wait()?)?);
    Ok(results)
}

fn values<B: Backend>(group: &ProcessGroup<B>, shape: [usize; 2], dtype: DType) -> TensorData {
    let fraction = if group.world_size() == 1 && dtype.is_float() { 0.37 } else { 0.0 };
    let rank = group.rank().0;
    let value = |i: usize| ((i * 7 + rank * 5) % 11) as f64 + fraction * (i % 13) as f64;
    TensorData::new((0..shape[0] * shape[1]).map(value).collect(), shape).convert_dtype(dtype)
}

fn read<B: Backend, const D: usize, K: GroupKind<B>>(tensor: Tensor<B, D, K>) -> Result<TensorData> {
    tensor.try_into_data().map_err(|error| Error::new(ErrorKind::Device, format!("{error}")))
}

#[cfg(test)]
mod tests {
    use burn_ddp::RankInfo;
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn a_connected_group_of_one_gives_the_results_of_an_unconnected_one() {
        let mut options = GroupOptions::new();
        options.connect_alone = true;
        let device = Default::default();
        let connected = ProcessGroup::<Ddp<Flex>>::new(RankInfo::solo(), options, &device).unwrap();
        let connected = results(&connected).unwrap();
        assert_eq!(connected, results(&ProcessGroup::<Ddp<Flex>>::solo(&device)).unwrap());
        let names: Vec<_> = connected.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.len(), 8, "{names:?}");
        assert_eq!(connected[0].1.len(), 4 * 18 + 12 + 6 + 1);
    }
}
