//! Short names for the types that a learner determines.

use burn::tensor::backend::AutodiffBackend;
use burn::train::{InferenceStep, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainStep};

/// Backend of the gradients and of the process group.
pub(super) type Inner<LC> = <<LC as LearningComponentsTypes>::Backend as AutodiffBackend>::InnerBackend;
/// Batch of a training step.
pub(super) type TrainInputOf<LC> = <<LC as LearningComponentsTypes>::TrainingModel as TrainStep>::Input;
/// Output of a training step.
pub(super) type TrainOutputOf<LC> = <<LC as LearningComponentsTypes>::TrainingModel as TrainStep>::Output;
/// Batch of a validation step.
pub(super) type ValidInputOf<LC> = <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Input;
/// Output of a validation step.
pub(super) type ValidOutputOf<LC> =
    <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Output;
/// Receiver of the events of a training, which passes them to metrics, files and renderer.
pub(super) type Processor<LC> = SupervisedTrainingEventProcessor<LC>;
