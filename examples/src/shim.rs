use burn::module::*;
use burn::optim::*;
use burn::tensor::{backend::*, *};
use burn_ddp::*;
pub type Ddp<B> = B;
pub struct ProcessGroup<B>(std::marker::PhantomData<B>);
pub enum ReduceOp {
    Sum,
}
pub struct W<T>(T);
impl<T> W<T> {
    pub fn wait(self) -> Result<T> {
        Ok(self.0)
    }
}
impl<B: Backend> ProcessGroup<B> {
    pub fn from_env(_: &B::Device) -> Result<Self> {
        Ok(Self(Default::default()))
    }
    pub fn rank(&self) -> Rank {
        Rank(0)
    }
    pub fn world_size(&self) -> usize {
        1
    }
    pub fn all_reduce<const D: usize>(&self, t: Tensor<B, D>, _: ReduceOp) -> W<Tensor<B, D>> {
        W(t)
    }
}
pub struct MicroStep<B: AutodiffBackend> {
    g: GradientsParams,
    l: Option<Tensor<B, 1>>,
}
impl<B: AutodiffBackend> MicroStep<B> {
    pub fn new(g: GradientsParams) -> Self {
        Self { g, l: None }
    }
    pub fn with_loss(mut self, l: Tensor<B, 1>) -> Self {
        self.l = Some(l);
        self
    }
}
pub struct ReplicaOptions;
impl ReplicaOptions {
    pub fn new() -> Self {
        Self
    }
    pub fn with_norm(self) -> Self {
        self
    }
    pub fn with_clip_norm(self, _: f64) -> Self {
        self
    }
}
pub struct Reduced {
    pub grads: GradientsParams,
    pub loss: Option<f64>,
    pub norm: Option<f64>,
}
pub struct Replica<B> {
    acc: Option<GradientsParams>,
    n: usize,
    l: f64,
    p: std::marker::PhantomData<B>,
}
impl<B: AutodiffBackend> Replica<B> {
    pub fn new<M: Module<B>>(
        m: M,
        _: &ProcessGroup<B::InnerBackend>,
        _: ReplicaOptions,
    ) -> Result<(M, Self)> {
        Ok((m, Self { acc: None, n: 0, l: 0., p: Default::default() }))
    }
    pub fn no_sync<M: AutodiffModule<B>>(&mut self, _m: &M, s: MicroStep<B>) -> Result<()> {
        self.acc = Some(s.g);
        self.n += 1;
        self.l += s.l.unwrap().into_scalar().elem::<f64>();
        Ok(())
    }
    pub fn reduce<M: AutodiffModule<B>>(&mut self, m: &M, s: MicroStep<B>) -> Result<Reduced> {
        let _ = m;
        self.n += 1;
        self.l += s.l.unwrap().into_scalar().elem::<f64>();
        let r = Reduced { grads: s.g, loss: Some(self.l / self.n as f64), norm: Some(1.0) };
        self.n = 0;
        self.l = 0.;
        Ok(r)
    }
    pub fn verify<M>(&self, _: &M) -> Result<()> {
        Ok(())
    }
    pub fn parameter_hash<M>(&self, _: &M) -> Result<u64> {
        Ok(1)
    }
}
pub struct Launcher;
impl Launcher {
    pub fn new(_: usize) -> Self {
        Self
    }
    pub fn args(self, _: impl Iterator) -> Self {
        self
    }
    pub fn run(self) -> Result<()> {
        Ok(())
    }
}
