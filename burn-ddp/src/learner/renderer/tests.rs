use std::sync::{Arc, Mutex};

use burn::train::metric::{MetricAttributes, SerializedEntry};

use super::*;

/// A buffer that outlives the renderer's half of it.
#[derive(Clone, Default)]
struct Paper(Arc<Mutex<Vec<u8>>>);

impl Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Paper {
    fn lines(&self) -> Vec<String> {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap().lines().map(String::from).collect()
    }
}

fn id(name: &str) -> MetricId {
    MetricId::new(Arc::new(name.into()))
}

fn renderer(paper: &Paper, metrics: &[&str]) -> PlainRenderer {
    let mut renderer = PlainRenderer::to(paper.clone());
    for name in metrics {
        renderer.register_metric(MetricDefinition {
            metric_id: id(name),
            name: (*name).into(),
            description: None,
            attributes: MetricAttributes::None,
        });
    }
    renderer
}

fn text(name: &str, formatted: &str) -> MetricState {
    MetricState::Generic(MetricEntry::new(id(name), SerializedEntry::new(formatted.into(), String::new())))
}

fn number(name: &str, number: NumericEntry) -> MetricState {
    // Burn's own text has two decimals, which the lines must not be made of.
    let entry = SerializedEntry::new("epoch 0.53 - batch 0.53".into(), number.serialize());
    MetricState::Numeric(MetricEntry::new(id(name), entry), number)
}

fn mean(name: &str, value: f64, count: usize) -> MetricState {
    number(name, NumericEntry::Aggregated { aggregated_value: value, count })
}

fn at(epoch: usize, items: usize, of: usize, iteration: usize) -> TrainingProgress {
    TrainingProgress {
        progress: Some(Progress { items_processed: items, items_total: of }),
        global_progress: Progress { items_processed: epoch, items_total: 2 },
        iteration: Some(iteration),
    }
}

#[test]
fn a_line_every_so_many_iterations_and_one_for_the_epoch_weighted_by_items() {
    let paper = Paper::default();
    // Definitions come out of a hash map; the order of the lines is that of the updates.
    let mut renderer = renderer(&paper, &["Accuracy", "Loss"]).every(2);
    for epoch in [1, 2] {
        for (iteration, (items, loss)) in
            [(10, 2.0), (10, 1.0), (10, 0.5321), (5, 0.25)].into_iter().enumerate()
        {
            renderer.update_train(mean("Loss", loss, items));
            renderer.update_train(mean("Accuracy", 81.25, items));
            let items = (iteration * 10) + items;
            renderer.render_train(at(epoch, items, 35, iteration + 1), vec![]);
        }
        for (iteration, loss) in [3.0, 1.0].into_iter().enumerate() {
            renderer.update_valid(mean("Loss", loss, 4));
            renderer.update_valid(mean("Accuracy", 100.0, 4));
            renderer.render_valid(at(epoch, (iteration + 1) * 4, 8, iteration + 1), vec![]);
        }
    }
    renderer.on_train_end(None).unwrap();
    let expected = |epoch| {
        [
            "train | items 20/35 | iteration 2 | Loss 1.00000 | Accuracy 81.2500",
            "train | items 35/35 | iteration 4 | Loss 0.250000 | Accuracy 81.2500",
            "train | items 35/35 | iteration 4 | epoch mean | Loss 1.04489 | Accuracy 81.2500",
            "valid | items 8/8 | iteration 2 | epoch mean | Loss 2.00000 | Accuracy 100.000",
        ]
        .map(|line| format!("epoch {epoch}/2 | {line}"))
    };
    assert_eq!(paper.lines(), [expected(1), expected(2)].concat());
}

#[test]
fn an_unknown_or_unreached_total_ends_with_what_comes_next() {
    let paper = Paper::default();
    let mut renderer = renderer(&paper, &["Loss"]).every(0);
    for (iteration, loss) in [1.0, 2.0].into_iter().enumerate() {
        renderer.update_train(mean("Loss", loss, 1));
        // A stream: all there is so far.
        renderer.render_train(at(1, iteration + 1, iteration + 1, iteration + 1), vec![]);
    }
    renderer.update_valid(mean("Loss", 7.0, 1));
    assert_eq!(paper.lines(), [""; 0]);
    renderer.render_valid(at(1, 1, 1, 1), vec![]);
    renderer.update_train(mean("Loss", 5.0, 1));
    renderer.render_train(at(2, 1, 8, 1), vec![]);
    // Interrupted in the second epoch.
    renderer.on_train_end(None).unwrap();
    assert_eq!(
        paper.lines(),
        [
            "epoch 1/2 | train | items 2/2 | iteration 2 | epoch mean | Loss 1.50000",
            "epoch 1/2 | valid | items 1/1 | iteration 1 | epoch mean | Loss 7.00000",
            "epoch 2/2 | train | items 1/8 | iteration 1 | epoch mean | Loss 5.00000",
        ]
    );
}

#[test]
fn single_values_count_once_and_the_machine_is_named() {
    let paper = Paper::default();
    let mut renderer = renderer(&paper, &["CPU Usage", "Learning Rate", "Cuda", "Note"]).every(1);
    for (iteration, value) in [10.0, 20.0].into_iter().enumerate() {
        renderer.update_train(text("Cuda", "   - Gpu #0\n   - Memory 1 Gb"));
        renderer.update_train(text("Note", "hello"));
        renderer.update_train(number("CPU Usage", NumericEntry::Value(value)));
        renderer.update_train(number("Learning Rate", NumericEntry::Value(value * 1e-5)));
        renderer.render_train(
            TrainingProgress { iteration: Some(iteration + 1), ..TrainingProgress::none() },
            vec![],
        );
    }
    renderer.on_train_end(None).unwrap();
    let lines = paper.lines();
    assert_eq!(
        lines[1],
        "epoch 0/0 | train | iteration 2 | Cuda (rank 0) - Gpu #0 - Memory 1 Gb | Note hello | \
         CPU Usage (rank 0) 20.0000 | Learning Rate 2.00000e-4"
    );
    assert!(lines[2].ends_with("CPU Usage (rank 0) 15.0000 | Learning Rate 1.50000e-4"), "{}", lines[2]);
    assert_eq!(lines.len(), 3);
}

#[test]
fn evaluations_end_with_their_means() {
    let paper = Paper::default();
    let mut renderer = renderer(&paper, &["Loss"]);
    for name in ["", "mirrored"] {
        for (iteration, loss) in [1.0, 3.0].into_iter().enumerate() {
            renderer.update_test(EvaluationName::new(name), mean("Loss", loss, 5));
            let progress = Progress { items_processed: iteration + 1, items_total: 3 };
            renderer.render_test(EvaluationProgress { progress, iteration: Some(iteration + 1) }, vec![]);
        }
    }
    renderer.on_test_end(None).unwrap();
    assert_eq!(
        paper.lines(),
        [
            "test | items 2/3 | iteration 2 | epoch mean | Loss 2.00000",
            "test mirrored | items 2/3 | iteration 2 | epoch mean | Loss 2.00000",
        ]
    );
}

#[test]
fn a_summary_is_printed() {
    let directory = tempfile::tempdir().unwrap();
    for split in ["train", "valid"] {
        std::fs::create_dir_all(directory.path().join(split).join("epoch-1")).unwrap();
        std::fs::write(directory.path().join(split).join("epoch-1/Loss.log"), "1.0\n2.0").unwrap();
    }
    let paper = Paper::default();
    let summary = LearnerSummary::new(directory.path(), &["Loss"]).unwrap();
    renderer(&paper, &[]).on_train_end(Some(summary)).unwrap();
    let lines = paper.lines();
    assert!(lines.iter().any(|line| line.contains("Valid") && line.contains("1.500")), "{lines:?}");
}

#[test]
fn a_pipe_that_nobody_reads_ends_nothing() {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    let mut refused = writer.try_clone().unwrap();
    assert_eq!(refused.write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    let mut renderer = PlainRenderer::to(writer).every(1);
    renderer.update_train(mean("Loss", 1.0, 1));
    renderer.render_train(at(1, 1, 1, 1), vec![]);
    renderer.on_train_end(None).unwrap();
}

#[test]
fn numbers_have_six_digits() {
    let cases = [
        (0.0, "0"),
        (0.5321, "0.532100"),
        (81.25, "81.2500"),
        (-2.345678, "-2.34568"),
        (0.0012345678, "0.00123457"),
        (0.00012, "1.20000e-4"),
        (999999.4, "999999"),
        (1.5e9, "1.50000e9"),
        (f64::NAN, "NaN"),
        (f64::INFINITY, "inf"),
    ];
    for (value, expected) in cases {
        assert_eq!(digits(value), expected);
    }
}
