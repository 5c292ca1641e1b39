//! The collective as a training loop calls it: tensors go to the communication thread and back.

use burn::tensor::{Tensor, TensorData};
use burn_ddp::communicator::AnyTensor;
use burn_ddp::process_group::GroupKind;
use burn_ddp::{DType, Ddp, Error, GroupOptions, ProcessGroup, Rank, RankInfo, ReduceOp, Result};
use burn_ddp_benches::pattern::Pattern;
use burn_flex::{Flex, FlexDevice};

use crate::AllReduce;

type Inner = Ddp<Flex>;

pub(crate) struct Group {
    group: ProcessGroup<Inner>,
    segments: usize,
    bytes: usize,
    /// The segments, flat and in order.
    tensors: Vec<Tensor<Inner, 1>>,
    one: Option<Tensor<Inner, 1>>,
}

impl Group {
    pub(crate) fn new(info: RankInfo, segments: usize) -> Result<Self> {
        let group = ProcessGroup::new(info, GroupOptions::from_env()?, &FlexDevice)?;
        let one = Some(Tensor::zeros([1], &FlexDevice));
        Ok(Self { group, segments, bytes: 0, tensors: Vec::new(), one })
    }
}

impl AllReduce for Group {
    fn place(&self) -> (Rank, usize) {
        (self.group.rank(), self.group.world_size())
    }

    fn prepare(&mut self, dtype: DType, bytes: usize) -> Result<()> {
        if dtype != DType::F32 {
            return Err(Error::config(format!("--dtype {dtype}: tensors of this backend are f32 (--group)")));
        }
        self.bytes = bytes;
        Ok(())
    }

    fn align(&mut self) -> Result<()> {
        let one = self.one.take().unwrap_or_else(|| Tensor::zeros([1], &FlexDevice));
        self.one = Some(self.group.all_reduce(one, ReduceOp::Sum).wait()?);
        Ok(())
    }

    fn fill(&mut self, pattern: Option<&Pattern>) -> Result<()> {
        let mut flat = vec![0_f32; self.bytes / size_of::<f32>()];
        if let Some(pattern) = pattern {
            pattern.fill(bytemuck::cast_slice_mut(&mut flat));
        }
        let share = flat.len().div_ceil(self.segments).max(1);
        let tensor = |part: Vec<f32>| {
            let length = part.len();
            Tensor::from_data(TensorData::new(part, [length]), &FlexDevice)
        };
        self.tensors = if share == flat.len() {
            vec![tensor(flat)]
        } else {
            flat.chunks(share).map(|part| tensor(part.to_vec())).collect()
        };
        Ok(())
    }

    fn reduce(&mut self) -> Result<()> {
        let mut tensors = std::mem::take(&mut self.tensors);
        if tensors.len() == 1 {
            let tensor = tensors.remove(0);
            self.tensors.push(self.group.all_reduce(tensor, ReduceOp::Sum).wait()?);
            return Ok(());
        }
        let list = tensors
            .into_iter()
            .map(|tensor| burn::tensor::Float::into_any(tensor.into_primitive()))
            .collect();
        for tensor in self.group.all_reduce_list(list, ReduceOp::Sum).wait()? {
            self.tensors.push(from_any(tensor)?);
        }
        Ok(())
    }

    fn check(&self, pattern: &Pattern) -> Result<()> {
        let mut flat = Vec::with_capacity(self.bytes);
        for tensor in &self.tensors {
            flat.extend_from_slice(tensor.to_data().as_bytes());
        }
        pattern.check(&flat)
    }

    fn finish(self: Box<Self>, outcome: Result<()>) -> Result<()> {
        self.group.finish(outcome)
    }
}

fn from_any(tensor: AnyTensor<Inner>) -> Result<Tensor<Inner, 1>> {
    Ok(Tensor::from_primitive(<burn::tensor::Float as GroupKind<Inner>>::from_any(tensor)?))
}
