//! Burn's `SupervisedTraining` on several processes.
//!
//! Burn calls a [`SupervisedLearningStrategy`] after every rank has taken the terminal, opened the log file and created
//! metric files, and a strategy cannot return an error. This module therefore replaces the launch:
//! [`launch_ddp`](LaunchDdp::launch_ddp) instead of `launch` silences all ranks but 0, runs a strategy of its own, and
//! returns a `Result`. The life of a launch, with the file that holds each part:
//!
//! ```text
//! launch_ddp (mod)             ranks other than 0 get a renderer that prints nothing
//!  `- Burn's launch            starts the threads of metrics, renderer and checkpoints, calls the strategy
//!      `- strategy
//!          |- prepare          options compared, rank 0's checkpoint loaded, its learner sent to all ranks
//!          |- training         data loaders checked, then for each epoch:
//!          |   |- epoch        each micro-step: batch -> forward, backward -> reduce -> optimizer step
//!          |   |   `- gather   outputs of all ranks -> rank 0 -> one output of the global batch
//!          |   |- events       that output -> metrics, files, renderer of rank 0
//!          |   `- training     rank 0 saves a checkpoint, decides on an early stop, and sends the decision
//!          `- ending           metrics and checkpoints are waited for; the first error ends all ranks
//! ```
//!
//! Two rules follow. Metrics, files, early stopping and the choice of a checkpoint see the global batch only, so they
//! are the same for any number of ranks. A stop that one rank requests takes effect on all ranks after the same
//! micro-step.
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

use std::sync::{Arc, Mutex, PoisonError};

use burn::train::{Learner, LearningComponentsTypes, LearningResult, SupervisedTraining, TrainingStrategy};
use burn_ddp_comm::Result;

mod ending;
mod epoch;
mod events;
mod gather;
mod options;
mod output;
mod panics;
mod prepare;
mod renderer;
mod session;
mod signals;
mod silent;
mod state;
mod strategy;
mod training;
mod types;

pub use options::{BufferPolicy, DdpStrategy, IncompleteWindow};
pub use output::{DdpOutput, GlobalParts, Parts};
pub use renderer::PlainRenderer;

use panics::Panics;
use silent::SilentRenderer;
use strategy::Strategy;
use types::{Inner, TrainOutputOf, ValidOutputOf};

/// [`SupervisedTraining::launch`] on all ranks of a group.
pub trait LaunchDdp<LC: LearningComponentsTypes> {
    /// Trains `learner` on all ranks of the strategy's group and returns the same model on each of them.
    ///
    /// All ranks call it, with sharded data loaders ([`data`](crate::data)). A model whose output does not implement
    /// [`DdpOutput`] is a compile error that names the trait. The [module documentation](self) has an example.
    ///
    /// # Errors
    /// - [`ErrorKind::Config`](crate::ErrorKind::Config) for loaders that are not sharded and for options that cannot
    ///   work;
    /// - [`ErrorKind::Mismatch`](crate::ErrorKind::Mismatch) for options or data that differ between ranks;
    /// - [`ErrorKind::Program`](crate::ErrorKind::Program) for a panic of the user's code, with its place and message;
    /// - [`ErrorKind::Io`](crate::ErrorKind::Io) for a checkpoint that cannot be written;
    /// - the error of another rank, with that rank's name.
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
            self.renderer(SilentRenderer { names: names.clone() }).with_application_logger(None)
        };
        let strategy = Arc::new(Strategy::new(ddp.clone(), panics.clone(), names));
        let training = training.with_training_strategy(TrainingStrategy::Custom(strategy.clone()));
        let launched = panics.guard_threads("the launch", || training.launch(learner));
        let failure = strategy.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        match failure {
            // The strategy has stored the error and left `launch` by a panic without a message.
            Some(error) => Err(error),
            None => launched.inspect_err(|error| ddp.group.fail(error)),
        }
    }
}
