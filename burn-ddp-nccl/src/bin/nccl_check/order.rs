//! NCCL reads a bucket after Burn's kernels have written it, because of the fence.
//!
//! Two buckets are written in turns, each behind a chain of matrix products, and given to NCCL at once. The matrix of
//! the products moves rows by one, so the contents of the buckets are known exactly. They differ from round to round,
//! since new memory may hold the bucket of the round before. NCCL works out of place: in place, an all-reduce of one
//! rank does nothing, and would be right in any order.
//!
//! Without the fence the same must go wrong; otherwise the first half has shown nothing.

use std::time::{Duration, Instant};

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData, TensorPrimitive};
use burn_cuda::Cuda;
use burn_ddp::communicator::AnyTensor;
use burn_ddp::{DType, Error, ErrorKind, Result};
use burn_ddp_comm::transport::Liveness;
use burn_ddp_nccl::{CudaAccess, CudaBackend, DeviceAccess, DeviceBuffer, Fence, NcclComm};

use crate::Machine;
use crate::group::Plain;
use crate::memory::{Memory, all_reduce};
use crate::report::Report;

const ROUNDS: usize = 20;
/// Rows of the matrices.
const ROWS: usize = 4096;
/// Rows that go into a bucket from one chain.
const TAKEN: usize = 64;
const HALF: usize = TAKEN * ROWS;
/// Shortest time of a chain.
const CHAIN: Duration = Duration::from_millis(150);
/// Most products of a chain: their launches fit into the queue of a stream, so that starting them does not block.
const LONGEST: usize = 400;

pub(crate) fn check(machine: &Machine, report: &mut Report) -> Result<()> {
    let mut comm = machine.alone(machine.stream()?, Liveness::new(1))?;
    backend::<Cuda>("with fusion", machine, &mut comm, report)?;
    backend::<Plain>("without fusion", machine, &mut comm, report)?;
    comm.finish()
}

fn backend<B: CudaBackend>(
    name: &str,
    machine: &Machine,
    comm: &mut NcclComm,
    report: &mut Report,
) -> Result<()> {
    let mut chain = Chain::<B>::calibrated(&machine.device)?;
    // The first collective of all, and the first allocations.
    round(&mut chain, comm, Fence::wait)?;
    let mut wrong = |wait: fn(Fence) -> Result<()>| -> Result<(usize, Duration)> {
        let (mut wrong, mut shortest) = (0, Duration::MAX);
        for _ in 0..ROUNDS {
            let (right, queued) = round(&mut chain, comm, wait)?;
            wrong += usize::from(!right);
            shortest = shortest.min(queued);
        }
        Ok((wrong, shortest))
    };
    let (fenced, queued) = wrong(Fence::wait)?;
    let (unfenced, _) = wrong(|_| Ok(()))?;
    let length = format!("the device was busy for at least {} ms a round", queued.as_millis());
    let fenced = match fenced {
        0 => Ok(format!("0 of {ROUNDS} wrong; {length}")),
        wrong => Err(format!("{wrong} of {ROUNDS} wrong; {length}")),
    };
    report.line(&format!("order {name}"), fenced);
    let unfenced = match unfenced {
        0 => Err(format!("0 of {ROUNDS} wrong: the test shows nothing")),
        wrong => Ok(format!("{wrong} of {ROUNDS} wrong")),
    };
    report.line(&format!("without the fence {name}"), unfenced);
    Ok(())
}

/// Returns whether NCCL has read the right contents of both buckets, and the time from their submission until the
/// device was done.
#[allow(unsafe_code)]
fn round<B: CudaBackend>(
    chain: &mut Chain<B>,
    comm: &mut NcclComm,
    wait: fn(Fence) -> Result<()>,
) -> Result<(bool, Duration)> {
    let size = DType::F32.size();
    // Allocated before: that waits for the device.
    let results = [Memory::of(&vec![0xAB; 2 * HALF * size])?, Memory::of(&vec![0xAB; 2 * HALF * size])?];
    let (buckets, expected) = chain.write()?;
    let submitted = Instant::now();
    let [a, b] = buckets.map(|bucket| {
        let primitive = bucket.into_primitive().tensor();
        DeviceAccess::<B>::open(&CudaAccess, AnyTensor::Float(primitive))
    });
    let mut kept = Vec::new();
    for (buffer, result) in [a?, b?].into_iter().zip(&results) {
        let DeviceBuffer { address, fence, kept: memory, .. } = buffer;
        kept.push(memory);
        wait(fence)?;
        // SAFETY: both ends are kept beyond the call. Without the fence the kernels that write the bucket still run,
        // which is the purpose of the check.
        unsafe { all_reduce(comm, address, result.address(0), 2 * HALF) }?;
    }
    chain.sync()?;
    let queued = submitted.elapsed();
    let mut right = true;
    for ((result, expected), kept) in results.iter().zip(&expected).zip(kept) {
        right &= floats(&result.read()?) == *expected;
        let AnyTensor::Float(tensor) = DeviceAccess::<B>::close(&CudaAccess, kept)? else { continue };
        let tensor = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(tensor));
        if data(tensor)? != *expected {
            return Err(Error::new(ErrorKind::Diverged, "Burn itself does not read what was written"));
        }
    }
    Ok((right, queued))
}

/// Two buckets and their contents.
type Written<B> = ([Tensor<B, 1>; 2], [Vec<f32>; 2]);

/// Matrix products one after the other.
struct Chain<B: Backend> {
    device: B::Device,
    rows: usize,
    /// Moves rows down by one.
    shift: Tensor<B, 2>,
    length: usize,
    rounds: usize,
}

impl<B: Backend> Chain<B> {
    /// A chain of `length` products of matrices of `rows` rows and columns.
    fn new(rows: usize, length: usize, device: &B::Device) -> Self {
        let mut values = vec![0f32; rows * rows];
        (0..rows).for_each(|row| values[row * rows + (row + rows - 1) % rows] = 1.0);
        let shift = Tensor::from_data(TensorData::new(values, [rows, rows]), device);
        Self { device: device.clone(), rows, shift, length, rounds: 0 }
    }

    /// A chain of as many products as take [`CHAIN`].
    fn calibrated(device: &B::Device) -> Result<Self> {
        let mut this = Self::new(ROWS, 8, device);
        let run = || data(this.run(this.shift.clone()).sum());
        // Compiles, and chooses among kernels.
        run()?;
        let started = Instant::now();
        run()?;
        let one = started.elapsed() / this.length as u32;
        this.length = (CHAIN.as_secs_f64() / one.as_secs_f64()).ceil().min(LONGEST as f64) as usize;
        Ok(this)
    }

    fn run(&self, matrix: Tensor<B, 2>) -> Tensor<B, 2> {
        (0..self.length).fold(matrix, |matrix, _| self.shift.clone().matmul(matrix))
    }

    fn sync(&self) -> Result<()> {
        B::sync(&self.device).map_err(|error| Error::new(ErrorKind::Device, format!("{error}")))
    }

    /// Buckets that the device has not written yet.
    fn write(&mut self) -> Result<Written<B>> {
        self.rounds += 1;
        let (size, half) = (self.rows, TAKEN * self.rows);
        let value = |row: usize| ((row * 31 + self.rounds * 17) % 251) as f32;
        let start: Vec<f32> = (0..size * size).map(|i| value(i / size)).collect();
        let start = Tensor::<B, 2>::from_data(TensorData::new(start, [size, size]), &self.device);
        self.sync()?;
        let once = self.run(start);
        let twice = self.run(once.clone());
        let rows = |matrix: &Tensor<B, 2>, bucket: usize| {
            matrix.clone().slice([bucket * TAKEN..(bucket + 1) * TAKEN, 0..size]).reshape([half])
        };
        let [mut a, mut b] = [(); 2].map(|()| Tensor::<B, 1>::empty([2 * half], &self.device));
        for (turn, matrix) in [&once, &twice].into_iter().enumerate() {
            let place = turn * half..(turn + 1) * half;
            a = a.slice_assign([place.clone()], rows(matrix, 0));
            b = b.slice_assign([place], rows(matrix, 1));
        }
        let expected = [0, 1].map(|bucket| {
            let row = |i: usize| {
                let (turn, row) = (i / half, bucket * TAKEN + i % half / size);
                let moved = (turn + 1) * self.length % size;
                value((row + size - moved) % size)
            };
            (0..2 * half).map(row).collect()
        });
        Ok(([a, b], expected))
    }
}

fn data<B: Backend>(tensor: Tensor<B, 1>) -> Result<Vec<f32>> {
    let failed = |error: String| Error::new(ErrorKind::Device, error);
    let data = tensor.try_into_data().map_err(|error| failed(error.to_string()))?;
    data.into_vec().map_err(|error| failed(format!("{error:?}")))
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|element| f32::from_ne_bytes(*element)).collect()
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn a_chain_makes_the_expected_buckets() {
        let mut chain = Chain::<Flex>::new(2 * TAKEN, 7, &Default::default());
        let mut before = Vec::new();
        for _ in 0..ROUNDS {
            let (buckets, expected) = chain.write().unwrap();
            let buckets = buckets.map(|bucket| data(bucket).unwrap());
            assert_eq!(buckets, expected);
            // Old contents must never be right, neither in their own bucket nor in the other.
            for bucket in &buckets {
                assert!(!before.contains(bucket));
            }
            before.extend(buckets);
        }
    }
}
