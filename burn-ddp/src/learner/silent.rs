//! The renderer of ranks other than 0, which prints nothing.
//!
//! Burn starts metrics and renderer on every rank, but rank 0's numbers are those of all ranks. Without a renderer of
//! its own a rank would get Burn's default one, which prints or takes the terminal.

use std::sync::{Arc, Mutex, PoisonError};

use burn::train::LearnerSummary;
use burn::train::metric::MetricDefinition;
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};

/// Prints nothing and collects the names of the metrics, which Burn tells to renderers only.
#[derive(Clone, Default)]
pub(super) struct SilentRenderer {
    /// Names in the order in which Burn gives them, which differs between processes: sort before comparing.
    pub(super) names: Arc<Mutex<Vec<String>>>,
}

type Ended = Result<(), Box<dyn std::error::Error>>;

impl MetricsRendererTraining for SilentRenderer {
    fn update_train(&mut self, _: MetricState) {}

    fn update_valid(&mut self, _: MetricState) {}

    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}

    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}

    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Ended {
        Ok(())
    }
}

impl MetricsRendererEvaluation for SilentRenderer {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}

    fn on_test_end(&mut self, _: Option<LearnerSummary>) -> Ended {
        Ok(())
    }
}

impl MetricsRenderer for SilentRenderer {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).push(definition.name);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::train::metric::{MetricAttributes, MetricId};

    use super::*;

    #[test]
    fn names_reach_whoever_holds_them() {
        let mut silent = SilentRenderer::default();
        let names = silent.names.clone();
        for name in ["Loss", "Accuracy"] {
            silent.register_metric(MetricDefinition {
                metric_id: MetricId::new(Arc::new(name.into())),
                name: name.into(),
                description: None,
                attributes: MetricAttributes::None,
            });
        }
        assert_eq!(*names.lock().unwrap(), ["Loss", "Accuracy"]);
    }
}
