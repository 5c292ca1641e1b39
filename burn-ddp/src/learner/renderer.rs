//! Metrics as plain lines, for logs and pipes.
//!
//! Burn draws metrics on a terminal; without one it prints the progress and no metric. This renderer prints both, with
//! enough digits to compare two runs. Burn does not tell a renderer when an epoch ends. A pass over a split ends when
//! the item count reaches a total that was announced before; without a total it ends with the first step of the next
//! pass, or with the training.

use std::io::{self, Write};

use burn::data::dataloader::Progress;
use burn::train::LearnerSummary;
use burn::train::metric::{MetricDefinition, MetricEntry, MetricId, NumericEntry};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};

/// Metrics of the machine, which are rank 0's alone: only outputs are gathered.
const MACHINE_METRICS: [&str; 4] = ["CPU Usage", "CPU Temperature", "CPU Memory", "Cuda"];

/// Renderer that prints one line every N training iterations, and one with the means of the whole pass at the end of
/// each pass over a split:
///
/// ```text
/// epoch 1/2 | train | items 640/60000 | iteration 10 | Loss 1.83251 | Accuracy 40.6250
/// epoch 1/2 | train | items 60000/60000 | iteration 938 | epoch mean | Loss 0.532100 | Accuracy 81.2500
/// ```
///
/// Values have six significant digits. Means of a pass are weighted by items, as in Burn's own summary. A metric that
/// is not numeric shows its last text and has no mean. Metrics of the machine are marked `(rank 0)`.
///
/// ```
/// use burn_ddp::learner::PlainRenderer;
///
/// // For `SupervisedTraining::renderer`.
/// let renderer = PlainRenderer::new().every(100);
/// # drop(renderer);
/// ```
pub struct PlainRenderer {
    output: Box<dyn Write + Send + Sync>,
    every: usize,
    definitions: Vec<MetricDefinition>,
    /// Values of the iteration that is not rendered yet.
    pending: Vec<(MetricEntry, Option<NumericEntry>)>,
    pass: Option<Pass>,
}

impl PlainRenderer {
    /// Prints to standard output, every 10th training iteration.
    pub fn new() -> Self {
        Self::to(io::stdout())
    }

    /// Prints to `output`. Lines that cannot be written (to a closed pipe) are lost, and the training continues.
    pub fn to(output: impl Write + Send + Sync + 'static) -> Self {
        Self { output: Box::new(output), every: 10, definitions: Vec::new(), pending: Vec::new(), pass: None }
    }

    /// Prints a line every `iterations` training iterations (default 10); with 0, only at the end of each pass.
    pub fn every(mut self, iterations: usize) -> Self {
        self.every = iterations;
        self
    }

    fn print(&mut self, line: &str) {
        // A lost line is no reason to end the training.
        let _ = self.output.write_all(format!("{line}\n").as_bytes()).and_then(|()| self.output.flush());
    }

    fn label(&self, id: &MetricId) -> String {
        let known = self.definitions.iter().find(|definition| definition.metric_id == *id);
        let name = known.map_or("unregistered metric", |definition| definition.name.as_str());
        let machine = if MACHINE_METRICS.contains(&name) { " (rank 0)" } else { "" };
        format!("{name}{machine}")
    }

    fn update(&mut self, state: MetricState) {
        self.pending.push(match state {
            MetricState::Generic(entry) => (entry, None),
            MetricState::Numeric(entry, number) => (entry, Some(number)),
        });
    }

    fn render(&mut self, title: String, items: Option<Progress>, iteration: Option<usize>, within: bool) {
        if self.pass.as_ref().is_some_and(|pass| pass.title != title) {
            self.end_pass();
        }
        let mut pass = self.pass.take().unwrap_or_else(|| Pass::new(title));
        for (entry, number) in std::mem::take(&mut self.pending) {
            let label = self.label(&entry.metric_id);
            pass.add(label, entry, number);
        }
        let complete = pass.advance(items, iteration);
        let due = self.every > 0 && iteration.is_some_and(|iteration| iteration.is_multiple_of(self.every));
        if within && due {
            self.print(&pass.line(false));
        }
        if complete {
            self.print(&pass.line(true));
            pass.reported = true;
        }
        self.pass = Some(pass);
    }

    fn end_pass(&mut self) {
        if let Some(pass) = self.pass.take().filter(|pass| !pass.reported) {
            self.print(&pass.line(true));
        }
    }

    fn end(&mut self, summary: Option<LearnerSummary>) {
        self.end_pass();
        if let Some(summary) = summary {
            self.print(&summary.to_string());
        }
    }
}

impl Default for PlainRenderer {
    fn default() -> Self {
        Self::new()
    }
}

type Ended = Result<(), Box<dyn std::error::Error>>;

impl MetricsRendererTraining for PlainRenderer {
    fn update_train(&mut self, state: MetricState) {
        self.update(state);
    }

    fn update_valid(&mut self, state: MetricState) {
        self.update(state);
    }

    fn render_train(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        self.render(title(&item, "train"), item.progress, item.iteration, true);
    }

    fn render_valid(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        self.render(title(&item, "valid"), item.progress, item.iteration, false);
    }

    fn on_train_end(&mut self, summary: Option<LearnerSummary>) -> Ended {
        self.end(summary);
        Ok(())
    }
}

impl MetricsRendererEvaluation for PlainRenderer {
    fn update_test(&mut self, name: EvaluationName, state: MetricState) {
        // `render_test` does not get the name, so the pass keeps it.
        let title = if name.as_str().is_empty() { "test".into() } else { format!("test {name}") };
        if self.pass.as_ref().is_none_or(|pass| pass.title != title) {
            self.end_pass();
            self.pass = Some(Pass::new(title));
        }
        self.update(state);
    }

    fn render_test(&mut self, item: EvaluationProgress, _: Vec<ProgressType>) {
        let title = self.pass.as_ref().map_or("test".into(), |pass| pass.title.clone());
        self.render(title, Some(item.progress), item.iteration, false);
    }

    fn on_test_end(&mut self, summary: Option<LearnerSummary>) -> Ended {
        self.end(summary);
        Ok(())
    }
}

impl MetricsRenderer for PlainRenderer {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.definitions.push(definition);
    }
}

fn title(progress: &TrainingProgress, split: &str) -> String {
    let Progress { items_processed, items_total } = &progress.global_progress;
    format!("epoch {items_processed}/{items_total} | {split}")
}

/// One pass over one split.
struct Pass {
    title: String,
    items: Option<Progress>,
    iteration: Option<usize>,
    /// Metrics in the order of Burn's updates, which is that of registration; definitions come in any order.
    metrics: Vec<Tally>,
    /// True once the last line is printed.
    reported: bool,
}

impl Pass {
    fn new(title: String) -> Self {
        Self { title, items: None, iteration: None, metrics: Vec::new(), reported: false }
    }

    fn add(&mut self, label: String, entry: MetricEntry, number: Option<NumericEntry>) {
        let known = self.metrics.iter().position(|tally| tally.label == label);
        let index = known.unwrap_or_else(|| {
            self.metrics.push(Tally { label, latest: String::new(), sum: 0.0, weight: 0.0 });
            self.metrics.len() - 1
        });
        self.metrics[index].add(&entry, number);
    }

    /// Updates the progress, and returns true if this was certainly the last step. A stream of unknown length may give
    /// the items so far as the total, so only a total that was announced before it was reached counts.
    fn advance(&mut self, items: Option<Progress>, iteration: Option<usize>) -> bool {
        let total = |progress: &Progress| progress.items_total;
        let announced = self.items.as_ref().filter(|before| before.items_processed < before.items_total);
        let reached = items.as_ref().filter(|now| now.items_processed >= now.items_total);
        let complete = reached.is_some() && announced.map(total) == reached.map(total);
        (self.items, self.iteration, self.reported) = (items, iteration, false);
        complete
    }

    fn line(&self, whole: bool) -> String {
        let mut parts = vec![self.title.clone()];
        parts.extend(
            self.items.as_ref().map(|items| format!("items {}/{}", items.items_processed, items.items_total)),
        );
        parts.extend(self.iteration.map(|iteration| format!("iteration {iteration}")));
        if whole {
            parts.push("epoch mean".into());
        }
        // A text describes one batch, so it is left out of the line for the pass.
        let shown = self.metrics.iter().filter(|tally| !whole || tally.weight > 0.0);
        parts.extend(shown.map(|tally| tally.text(whole)));
        parts.join(" | ")
    }
}

/// One metric in one pass.
struct Tally {
    label: String,
    latest: String,
    sum: f64,
    /// Items of all numeric values; 0 for a metric without any.
    weight: f64,
}

impl Tally {
    fn add(&mut self, entry: &MetricEntry, number: Option<NumericEntry>) {
        let Some(number) = number else {
            let words: Vec<_> = entry.serialized_entry.formatted.split_whitespace().collect();
            self.latest = words.join(" ");
            return;
        };
        let value = number.current();
        let weight = match number {
            NumericEntry::Value(_) => 1.0,
            NumericEntry::Aggregated { count, .. } => count as f64,
        };
        self.latest = digits(value);
        if weight > 0.0 {
            self.sum += value * weight;
            self.weight += weight;
        }
    }

    fn text(&self, whole: bool) -> String {
        if whole && self.weight > 0.0 {
            format!("{} {}", self.label, digits(self.sum / self.weight))
        } else {
            format!("{} {}", self.label, self.latest)
        }
    }
}

/// Formats `value` with six significant digits.
fn digits(value: f64) -> String {
    let size = value.abs();
    if value == 0.0 || !value.is_finite() {
        value.to_string()
    } else if (1e-3..1e6).contains(&size) {
        let before_point = size.log10().floor() as i32 + 1;
        format!("{value:.*}", usize::try_from(6 - before_point).unwrap_or(0))
    } else {
        format!("{value:.5e}")
    }
}

#[cfg(test)]
mod tests;
