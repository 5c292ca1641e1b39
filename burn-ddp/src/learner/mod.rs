//! Burn's `SupervisedTraining` on many processes.
//!
//! Burn offers a seam for strategies of other crates, [`SupervisedLearningStrategy`], and this module is one. But a
//! strategy alone comes too late: by the time it runs, every rank has taken the terminal, opened the log file and
//! made the metric files, and it has no way to return an error. So the extension is the launch itself:
//! [`launch_ddp`](LaunchDdp::launch_ddp) in place of `launch` silences all ranks but 0, runs the strategy, and
//! returns a `Result`.
//!
//! [`SupervisedLearningStrategy`]: burn::train::SupervisedLearningStrategy
//!
//! ```no_run
//! # use std::sync::Arc;
//! # use burn::data::dataloader::{DataLoader, batcher::Batcher};
//! # use burn::data::dataset::Dataset;
//! # use burn::lr_scheduler::constant::ConstantLr;
//! # use burn::module::{AutodiffModule, Module};
//! # use burn::optim::AdamWConfig;
//! # use burn::tensor::backend::AutodiffBackend;
//! # use burn::train::metric::LossMetric;
//! # use burn::train::{ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainStep};
//! use burn_ddp::ProcessGroup;
//! use burn_ddp::data::DataLoaderBuilder;
//! use burn_ddp::learner::{DdpStrategy, LaunchDdp};
//! # type Device<B> = <B as burn::tensor::backend::BackendTypes>::Device;
//! # fn train<B, M, I, D, Bt>(model: M, train: D, test: D, batcher: Bt, device: Device<B>) -> burn_ddp::Result<()>
//! # where
//! #     B: AutodiffBackend,
//! #     M: AutodiffModule<B> + TrainStep<Input = I, Output = ClassificationOutput<B>> + std::fmt::Display + 'static,
//! #     M::InnerModule: InferenceStep<Input = I, Output = ClassificationOutput<B::InnerBackend>>,
//! #     I: Send + Clone + std::fmt::Debug + 'static,
//! #     D: Dataset<u8> + 'static,
//! #     Bt: Batcher<B, u8, I> + Batcher<B::InnerBackend, u8, I> + Clone + 'static,
//! # {
//!
//! // `B` is `Autodiff<Ddp<Flex>>` where it was `Autodiff<Flex>`.
//! let group = ProcessGroup::from_env(&device)?;
//! let ddp = DdpStrategy::new(&group);
//! let train = DataLoaderBuilder::new(batcher.clone(), &group).batch_size(64).shuffle(42).build(train)?;
//! let valid = DataLoaderBuilder::new(batcher, &group).batch_size(64).build(test)?;
//! let training = SupervisedTraining::new("artifacts", train, valid)
//!     .metrics((LossMetric::new(),))
//!     .num_epochs(2);
//! let result = training.launch_ddp(&ddp, Learner::new(model, AdamWConfig::new().init(), ConstantLr::new(1e-3)))?;
//! # let _ = result;
//! # Ok(())
//! # }
//! ```
//!
//! # What is whose
//!
//! Data are sharded, gradients reduced, outputs gathered: everything a metric, a file, the terminal, early stopping
//! or the choice of a checkpoint sees is of the global batch. Decisions are rank 0's, made after its metrics are
//! complete, and sent to the others. A stop that any rank asks for is agreed on one micro-step ahead.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::backend::AutodiffBackend;
use burn::train::{
    InferenceStep, Learner, LearningComponentsTypes, LearningResult, SupervisedTraining, TrainStep,
    TrainingStrategy,
};

use crate::error::Result;

mod epoch;
mod gather;
mod options;
mod output;
mod panics;
mod renderer;
mod session;
mod signals;
mod silent;
mod state;
mod strategy;

pub use options::{BufferPolicy, DdpStrategy, IncompleteWindow};
pub use output::{DdpOutput, GlobalParts, Parts};
pub use renderer::PlainRenderer;

use panics::Panics;
use silent::Silent;
use strategy::Strategy;

/// The backend of a learner's gradients and of its group.
type Inner<LC> = <<LC as LearningComponentsTypes>::Backend as AutodiffBackend>::InnerBackend;
/// What a training step returns.
type TrainOutputOf<LC> = <<LC as LearningComponentsTypes>::TrainingModel as TrainStep>::Output;
/// What a validation step returns.
type ValidOutputOf<LC> = <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Output;

/// [`SupervisedTraining::launch`] on all ranks of a group.
pub trait LaunchDdp<LC: LearningComponentsTypes> {
    /// Trains `learner` on all ranks of the strategy's group and returns the same model on all of them. All ranks
    /// call it, with data loaders that are sharded ([`data`](crate::data)).
    ///
    /// An output that cannot be gathered is a compile error that names the trait to implement:
    ///
    /// ```compile_fail
    #[doc = include_str!("../../tests/compile_fail/output_without_trait.rs")]
    /// ```
    ///
    /// # Errors
    /// Loaders that are not sharded, options or data that differ between ranks, a panic of the user's code or a
    /// failure of any other rank, each with the rank it began on.
    fn launch_ddp(
        self,
        ddp: &DdpStrategy<Inner<LC>>,
        learner: Learner<LC>,
    ) -> Result<LearningResult<LC::InferenceModel>>
    where
        TrainOutputOf<LC>: DdpOutput,
        ValidOutputOf<LC>: DdpOutput;
}

impl<LC: LearningComponentsTypes + Send + 'static> LaunchDdp<LC> for SupervisedTraining<LC> {
    fn launch_ddp(
        self,
        ddp: &DdpStrategy<Inner<LC>>,
        learner: Learner<LC>,
    ) -> Result<LearningResult<LC::InferenceModel>>
    where
        TrainOutputOf<LC>: DdpOutput,
        ValidOutputOf<LC>: DdpOutput,
    {
        let rank = ddp.group.rank();
        let panics = Panics::watch(rank);
        let names = Arc::<Mutex<Vec<String>>>::default();
        let training = if rank.is_root() {
            self
        } else {
            self.renderer(Silent { names: names.clone() }).with_application_logger(None)
        };
        let strategy = Arc::new(Strategy::new(ddp.clone(), panics.clone(), names));
        let training = training.with_training_strategy(TrainingStrategy::Custom(strategy.clone()));
        let launched = panics.guard_threads("the launch", || training.launch(learner));
        let failure = strategy.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        match failure {
            // The strategy has left `launch` by a panic that says nothing.
            Some(error) => Err(error),
            None => launched.inspect_err(|error| ddp.group.fail(error)),
        }
    }
}
