use burn::backend::Autodiff;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::{Module, Param};
use burn::optim::{GradientsParams, Sgd, SgdConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::Tensor;
use burn::train::{
    InferenceStep, ItemLazy, Learner, LearningComponentsMarker, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_ddp::Ddp;
use burn_ddp::learner::{DdpStrategy, LaunchDdp};
use burn_flex::Flex;

type B = Autodiff<Ddp<Flex>>;

/// An output for which nobody has said how it is joined.
struct Scores<B: Backend>(Tensor<B, 1>);

impl<B: Backend> ItemLazy for Scores<B> {
    type ItemSync = Scores<B>;

    fn sync(self) -> Self {
        self
    }
}

#[derive(Module, Debug)]
struct Model<B: Backend> {
    w: Param<Tensor<B, 1>>,
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Tensor<B, 1>;
    type Output = Scores<B>;

    fn step(&self, batch: Tensor<B, 1>) -> TrainOutput<Scores<B>> {
        let loss = (self.w.val() * batch).mean();
        TrainOutput::new(self, loss.backward(), Scores(loss))
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Tensor<B, 1>;
    type Output = Scores<B>;

    fn step(&self, batch: Tensor<B, 1>) -> Scores<B> {
        Scores((self.w.val() * batch).mean())
    }
}

type Parts = LearningComponentsMarker<B, ConstantLr, Model<B>, OptimizerAdaptor<Sgd<Ddp<Flex>>, Model<B>, B>>;

fn train(training: SupervisedTraining<Parts>, learner: Learner<Parts>, ddp: &DdpStrategy<Ddp<Flex>>) {
    let _ = training.launch_ddp(ddp, learner);
}

fn main() {
    let _ = (train, GradientsParams::new(), SgdConfig::new());
}
