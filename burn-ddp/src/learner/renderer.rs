//! Plain lines for logs and pipes.
//!
//! Burn draws on a terminal; without one it prints the progress and no metric. This renderer prints both, with the
//! digits that a comparison of two runs needs. A renderer is not told when an epoch ends, only what was processed
//! last: so the end of a pass over a split is seen in the item count where a total was announced, and otherwise in
//! the first step of the next pass or in the end of the training.

use std::io::{self, Write};

use burn::data::dataloader::Progress;
use burn::train::LearnerSummary;
use burn::train::metric::{MetricDefinition, MetricEntry, MetricId, NumericEntry};
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};

/// Metrics of the machine that computes; outputs are gathered to rank 0, these are not.
const OF_THE_MACHINE: [&str; 4] = ["CPU Usage", "CPU Temperature", "CPU Memory", "Cuda"];

/// Prints one line every so many training iterations, and one at the end of each pass over a split with the values
/// of the whole pass:
///
/// ```text
/// epoch 1/2 | train | items 640/60000 | iteration 10 | Loss 1.83251 | Accuracy 40.6250
/// epoch 1/2 | train | items 60000/60000 | iteration 938 | epoch mean | Loss 0.532100 | Accuracy 81.2500
/// ```
///
/// Values have six significant digits. Those of a pass are weighted by items, as Burn's own summary is; a metric
/// that is not numeric shows its last text, and no mean. Metrics of the machine say that they are rank 0's alone.
///
/// ```
/// use burn_ddp::learner::PlainRenderer;
///
/// // What a `SupervisedTraining` takes: `.renderer(PlainRenderer::new().every(100))`.
/// let renderer = PlainRenderer::new().every(100);
/// # drop(renderer);
/// ```
pub struct PlainRenderer {
    output: Box<dyn Write + Send + Sync>,
    every: usize,
    definitions: Vec<MetricDefinition>,
    /// Values of the iteration whose progress is not known yet.
    pending: Vec<(MetricEntry, Option<NumericEntry>)>,
    pass: Option<Pass>,
}

impl PlainRenderer {
    /// Prints to standard output, every tenth training iteration.
    pub fn new() -> Self {
        Self::to(io::stdout())
    }

    /// Prints to `output`. An output that fails (a pipe nobody reads) loses the lines and ends nothing.
    pub fn to(output: impl Write + Send + Sync + 'static) -> Self {
        Self { output: Box::new(output), every: 10, definitions: Vec::new(), pending: Vec::new(), pass: None }
    }

    /// A line every `iterations` training iterations; with 0, only those at the ends of passes.
    pub fn every(mut self, iterations: usize) -> Self {
        self.every = iterations;
        self
    }

    fn say(&mut self, line: &str) {
        // Nobody to tell: standard error of a training that lost its log helps no one, and the run goes on.
        let _ = self.output.write_all(format!("{line}\n").as_bytes()).and_then(|()| self.output.flush());
    }

    fn label(&self, id: &MetricId) -> String {
        let known = self.definitions.iter().find(|definition| definition.metric_id == *id);
        let name = known.map_or("unregistered metric", |definition| definition.name.as_str());
        let machine = if OF_THE_MACHINE.contains(&name) { " (rank 0)" } else { "" };
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
        let complete = pass.proceed(items, iteration);
        let due = self.every > 0 && iteration.is_some_and(|iteration| iteration.is_multiple_of(self.every));
        if within && due {
            self.say(&pass.line(false));
        }
        if complete {
            self.say(&pass.line(true));
            pass.reported = true;
        }
        self.pass = Some(pass);
    }

    fn end_pass(&mut self) {
        if let Some(pass) = self.pass.take().filter(|pass| !pass.reported) {
            self.say(&pass.line(true));
        }
    }

    fn end(&mut self, summary: Option<LearnerSummary>) {
        self.end_pass();
        if let Some(summary) = summary {
            self.say(&summary.to_string());
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
        // What is rendered next has no name, but a pass has one title.
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

/// One time through one split.
struct Pass {
    title: String,
    items: Option<Progress>,
    iteration: Option<usize>,
    /// In the order in which Burn updates them, which is that of registration; definitions come in any order.
    metrics: Vec<Tally>,
    /// Whether its last line is out already.
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

    /// Whether this was certainly the last step. A stream that does not know its length may call every item so
    /// far the total, so only a total that was announced before it was reached counts.
    fn proceed(&mut self, items: Option<Progress>, iteration: Option<usize>) -> bool {
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
        // A text is of one batch.
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
    /// Items of all numeric values; 0 for a metric that has none.
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

/// `value` with six significant digits.
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
