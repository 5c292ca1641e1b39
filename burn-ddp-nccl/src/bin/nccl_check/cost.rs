//! Cost of a group for gradients: packing, fence and unpacking. In a group of one nothing is sent.
//!
//! The gradients are those of GPT-2 124 M (12 layers, width 768, 50 257 tokens, 1024 positions), in buckets of 25 MiB
//! from the last to the first. A plain copy of the same bytes on the device is measured for comparison.

use std::time::{Duration, Instant};

use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, TensorPrimitive};
use burn_cuda::{Cuda, CudaDevice};
use burn_ddp::communicator::AnyTensor;
use burn_ddp::{CommunicatorKind, Ddp, Error, ErrorKind, ProcessGroup, ReduceOp, Result};
use burn_ddp_nccl::NcclBackend;

use crate::Machine;
use crate::group::{Plain, connected};
use crate::memory::Memory;
use crate::report::Report;

const LAYERS: usize = 12;
const WIDTH: usize = 768;
const BUCKET: usize = 25 << 20;
const ELEMENT: usize = size_of::<f32>();
/// Repetitions that are not counted, and those that are.
const WARM_UP: usize = 3;
const COUNTED: usize = 11;

/// Sizes of all gradients, in the order of the parameters. A vector has one row.
fn shapes() -> Vec<[usize; 2]> {
    let layer_norm = [[1, WIDTH]; 2];
    let linear = |from: usize, to: usize| [[from, to], [1, to]];
    let block = [
        layer_norm,
        linear(WIDTH, 3 * WIDTH),
        linear(WIDTH, WIDTH),
        layer_norm,
        linear(WIDTH, 4 * WIDTH),
        linear(4 * WIDTH, WIDTH),
    ];
    let mut shapes = vec![[50_257, WIDTH], [1024, WIDTH]];
    (0..LAYERS).for_each(|_| shapes.extend(block.as_flattened()));
    shapes.extend(layer_norm);
    shapes
}

/// The gradients of each bucket.
fn buckets() -> Vec<Vec<[usize; 2]>> {
    let mut buckets: Vec<Vec<[usize; 2]>> = Vec::new();
    let mut room = 0;
    for shape in shapes().into_iter().rev() {
        let bytes = shape[0] * shape[1] * ELEMENT;
        match buckets.last_mut() {
            Some(bucket) if bytes <= room => bucket.push(shape),
            _ => {
                buckets.push(vec![shape]);
                room = BUCKET;
            }
        }
        room = room.saturating_sub(bytes);
    }
    buckets
}

pub(crate) fn check(machine: &Machine, report: &mut Report) -> Result<()> {
    let bytes = shapes().iter().map(|shape| shape[0] * shape[1] * ELEMENT).sum();
    // Makes the device current on this thread.
    let _stream = machine.stream()?;
    let (from, to) = (Memory::new(bytes)?, Memory::new(bytes)?);
    let copy = time(|| from.copy_to(&to), || Ok(()))?;
    drop((from, to));
    let megabytes = bytes as f64 / 1e6;
    report.note(format!("{megabytes:.1} MB of f32 in {} buckets, medians of {COUNTED}", buckets().len()));
    report.note(format!("a copy on the device: {}", milliseconds(copy)));
    let in_copies = |time: Duration| {
        format!("{}, {:.1} copies", milliseconds(time), time.as_secs_f64() / copy.as_secs_f64())
    };
    report.line("NCCL with fusion", reduction::<Ddp<Cuda>>(machine, CommunicatorKind::Nccl).map(in_copies));
    report
        .line("NCCL without fusion", reduction::<Ddp<Plain>>(machine, CommunicatorKind::Nccl).map(in_copies));
    report.line("host with fusion", reduction::<Ddp<Cuda>>(machine, CommunicatorKind::Host).map(in_copies));
    Ok(())
}

/// Time from the gradients until all are reduced and are tensors again. The results are checked first.
fn reduction<B: NcclBackend<Device = CudaDevice>>(
    machine: &Machine,
    kind: CommunicatorKind,
) -> Result<Duration> {
    let group = connected::<B>(machine, kind, 0)?;
    let gradient = |shape: &[usize; 2]| {
        let tensor = Tensor::<B, 2>::random(*shape, Distribution::Default, group.device());
        AnyTensor::Float(tensor.into_primitive().tensor())
    };
    let gradients: Vec<Vec<_>> =
        buckets().iter().map(|bucket| bucket.iter().map(gradient).collect()).collect();
    for (reduced, given) in reduce(&group, &gradients)?.into_iter().zip(&gradients) {
        for (reduced, given) in reduced.into_iter().zip(given) {
            let equal = matrix(reduced)?.equal(matrix(given.clone())?).all().into_scalar();
            if !burn::tensor::ElementConversion::elem::<bool>(equal) {
                return Err(Error::new(ErrorKind::Diverged, "the sum of one rank is not its gradient"));
            }
        }
    }
    let settle =
        || B::sync(group.device()).map_err(|error| Error::new(ErrorKind::Device, format!("{error}")));
    time(|| reduce(&group, &gradients).map(drop), settle)
}

type Lists<B> = Vec<Vec<AnyTensor<B>>>;

/// Reduces all buckets. All are in flight before the first is waited for, as in a backward pass.
fn reduce<B: Backend>(group: &ProcessGroup<B>, gradients: &Lists<B>) -> Result<Lists<B>> {
    let works: Vec<_> =
        gradients.iter().map(|bucket| group.all_reduce_list(bucket.clone(), ReduceOp::Sum)).collect();
    works.into_iter().map(|work| work.wait()).collect()
}

fn matrix<B: Backend>(tensor: AnyTensor<B>) -> Result<Tensor<B, 2>> {
    Ok(Tensor::from_primitive(TensorPrimitive::Float(tensor.into_float()?)))
}

/// The median time of `once` with `settle` behind it.
fn time(mut once: impl FnMut() -> Result<()>, settle: impl Fn() -> Result<()>) -> Result<Duration> {
    let mut times = Vec::new();
    for number in 0..WARM_UP + COUNTED {
        settle()?;
        let started = Instant::now();
        once()?;
        settle()?;
        if number >= WARM_UP {
            times.push(started.elapsed());
        }
    }
    times.sort();
    Ok(times[COUNTED / 2])
}

fn milliseconds(time: Duration) -> String {
    format!("{:.3} ms", time.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradients_of_gpt_2_in_buckets() {
        let count = |shapes: &[[usize; 2]]| shapes.iter().map(|shape| shape[0] * shape[1]).sum::<usize>();
        assert_eq!(count(&shapes()), 124_439_808);
        let buckets = buckets();
        assert_eq!(count(&buckets.concat()), 124_439_808);
        // The token embedding alone is larger than a bucket.
        let large: Vec<_> = buckets.iter().filter(|bucket| count(bucket) * ELEMENT > BUCKET).collect();
        assert_eq!(large, [&[[50_257, WIDTH]]]);
    }
}
