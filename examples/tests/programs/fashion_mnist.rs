//! The program `fashion_mnist`, run as users run it, on a small data set of its own format.

mod terminal;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::GzEncoder;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::process::{LIMIT, assert_backends_are_chosen, assert_refused, command, finish, run, stdout};

const PROGRAM: &str = env!("CARGO_BIN_EXE_fashion_mnist");
const PIXELS: usize = 28 * 28;
/// As many items as `--limit 1000` leaves: with micro-batches of 64 both splits have an uneven tail.
const TRAIN: usize = 1000;
const TEST: usize = 167;
const BATCH: usize = 64;

fn gzip(path: &Path, bytes: &[u8]) {
    let mut encoder = GzEncoder::new(File::create(path).unwrap(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap();
}

fn idx(sizes: &[usize], data: &[u8]) -> Vec<u8> {
    let header = std::iter::once(0x800 + sizes.len()).chain(sizes.iter().copied());
    let mut bytes: Vec<u8> = header.flat_map(|word| u32::try_from(word).unwrap().to_be_bytes()).collect();
    bytes.extend_from_slice(data);
    bytes
}

/// Images with a bar in noise, which shows the label, but in every third image another one: what can be learnt leaves
/// a loss that is large beside rounding errors.
fn images(count: usize, mut noise: u32) -> (Vec<u8>, Vec<u8>) {
    let labels: Vec<u8> = (0..count).map(|item| (item * 7 % 10) as u8).collect();
    let mut pixels = Vec::with_capacity(count * PIXELS);
    for (item, label) in labels.iter().enumerate() {
        let shown = if item % 3 == 0 { (noise >> 16) as usize % 10 } else { usize::from(*label) };
        for pixel in 0..PIXELS {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let bar = pixel % 28 / 2 == 2 + shown;
            pixels.push((noise >> 25) as u8 + if bar { 60 } else { 0 });
        }
    }
    (pixels, labels)
}

/// The four files.
fn write_data(directory: &Path) {
    for (name, count) in [("train", TRAIN), ("t10k", TEST)] {
        let (pixels, labels) = images(count, count as u32);
        gzip(&directory.join(format!("{name}-images-idx3-ubyte.gz")), &idx(&[count, 28, 28], &pixels));
        gzip(&directory.join(format!("{name}-labels-idx1-ubyte.gz")), &idx(&[count], &labels));
    }
}

/// A data set, and a place for what runs leave.
struct Bench(TempDir);

impl Bench {
    fn new() -> Self {
        let bench = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir(bench.data()).unwrap();
        write_data(&bench.data());
        bench
    }

    fn data(&self) -> PathBuf {
        self.0.path().join("data")
    }

    fn command(&self, name: &str, args: &str) -> std::process::Command {
        let mut command = command(PROGRAM, args);
        command.arg("--data").arg(self.data()).arg("--artifacts").arg(self.0.path().join(name));
        command
    }

    /// Trains to the end, with the items of each micro-step written down.
    fn train(&self, name: &str, args: &str) -> Trained {
        let batches = self.0.path().join(format!("{name}-batches"));
        let mut command = self.command(name, &format!("--batch-size {BATCH} {args}"));
        command.arg("--log-batches").arg(&batches);
        // A launcher says whose a line is.
        let text = stdout(&run(command)).replace("[rank 0] ", "");
        assert!(!text.contains("[rank "), "{text}");
        Trained { text, artifacts: self.0.path().join(name), batches }
    }
}

/// Output and files of a run.
struct Trained {
    text: String,
    artifacts: PathBuf,
    batches: PathBuf,
}

impl Trained {
    /// The lines of a metric file: value and number of items.
    fn metric(&self, split: &str, epoch: usize, name: &str) -> Vec<(f64, usize)> {
        let path = self.artifacts.join(format!("{split}/epoch-{epoch}/{name}.log"));
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let pair = |line: &str| {
            let (value, items) = line.split_once(',')?;
            Some((value.parse().ok()?, items.parse().ok()?))
        };
        text.lines().map(|line| pair(line).unwrap_or_else(|| panic!("{}: {line}", path.display()))).collect()
    }

    /// Item-weighted mean of a metric file.
    fn mean(&self, split: &str, epoch: usize, name: &str) -> f64 {
        let lines = self.metric(split, epoch, name);
        let (sum, items) = lines
            .iter()
            .fold((0.0, 0), |(sum, all), (value, items)| (sum + value * *items as f64, all + items));
        sum / items as f64
    }

    /// The items of each micro-step of `epoch` over all ranks, in the order of the ranks. A rank for which the last
    /// micro-step has no items has no line there.
    fn global_batches(&self, world_size: usize, items: usize, epoch: usize) -> Vec<Vec<usize>> {
        let steps = items.div_ceil(BATCH);
        let tail = items - (steps - 1) * BATCH;
        let mut batches = vec![Vec::new(); steps];
        for rank in 0..world_size {
            let mut path = self.batches.clone().into_os_string();
            path.push(format!(".rank{rank}"));
            let text = std::fs::read_to_string(&path).unwrap();
            let own = steps - usize::from(rank >= tail);
            let lines: Vec<_> = text.lines().skip((epoch - 1) * own).take(own).collect();
            assert_eq!(lines.len(), own, "rank {rank}, epoch {epoch}: {text}");
            for (batch, line) in batches.iter_mut().zip(lines) {
                batch.extend(line.split(' ').map(|id| id.parse::<usize>().unwrap()));
            }
        }
        batches
    }

    /// All files under the directory of artifacts.
    fn files(&self) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let mut directories = vec![self.artifacts.clone()];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                } else {
                    found.insert(path.strip_prefix(&self.artifacts).unwrap().display().to_string());
                }
            }
        }
        found
    }

    /// Numbers of the last line: right, of all, loss.
    fn tested(&self) -> (usize, usize, f64) {
        let line = self.text.lines().last().unwrap();
        let parsed = (|| {
            let (counts, loss) = line.strip_prefix("test accuracy ")?.split_once("), loss ")?;
            let (right, items) = counts.split_once('(')?.1.split_once(" of ")?;
            Some((right.parse().ok()?, items.parse().ok()?, loss.parse().ok()?))
        })();
        parsed.unwrap_or_else(|| panic!("{}", self.text))
    }
}

fn assert_close(a: f64, b: f64, what: &str) {
    let off = (a - b).abs();
    assert!(off <= 1e-7 || off <= 1e-5 * a.abs().max(b.abs()), "{what}: {a} and {b}");
}

#[test]
fn one_process_leaves_metrics_checkpoints_and_the_accuracy_of_the_test_items() {
    let bench = Bench::new();
    let trained = bench.train("alone", "--epochs 2 --dropout 0 --norm batch");
    let metrics = ["train", "valid"].into_iter().flat_map(|split| {
        [1, 2].into_iter().flat_map(move |epoch| {
            ["Loss", "Accuracy"].map(|name| format!("{split}/epoch-{epoch}/{name}.log"))
        })
    });
    let checkpoints = ["model", "optim", "scheduler"]
        .into_iter()
        .flat_map(|name| [1, 2].map(|epoch| format!("checkpoint/{name}-{epoch}.mpk")));
    let expected: BTreeSet<_> = metrics.chain(checkpoints).chain(["experiment.log".into()]).collect();
    assert_eq!(trained.files(), expected);

    let mut order = Vec::new();
    for epoch in [1, 2] {
        let steps = trained.metric("train", epoch, "Accuracy");
        assert_eq!(steps.iter().map(|(_, items)| items).sum::<usize>(), TRAIN);
        let batches = trained.global_batches(1, TRAIN, epoch);
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [vec![64; 15], vec![40]].concat());
        let used: BTreeSet<_> = batches.iter().flatten().copied().collect();
        assert_eq!(used, (0..TRAIN).collect());
        order.push(batches);
    }
    assert_ne!(order[0], order[1], "the second epoch is shuffled anew");
    assert!(trained.mean("train", 2, "Loss") < trained.mean("train", 1, "Loss"), "{}", trained.text);

    let (right, items, loss) = trained.tested();
    assert_eq!(items, TEST);
    assert_close(trained.mean("valid", 2, "Accuracy"), 100.0 * right as f64 / items as f64, "accuracy");
    assert!(loss.is_finite() && loss > 0.0);
    for line in
        ["epoch 2/2 | train | items 1000/1000 | iteration 16 | epoch mean | Loss ", "| Valid | Accuracy |"]
    {
        assert!(trained.text.contains(line), "no {line} in {}", trained.text);
    }
}

/// Trains on one process and on more, and compares everything that is said and left.
fn compare(args: &str, items: usize) {
    let bench = Bench::new();
    let args = format!("--epochs 2 --dropout 0 {args}");
    let one = bench.train("1", &args);
    for world_size in [1, 2, 3] {
        let many = bench.train(&format!("of-{world_size}"), &format!("{args} --nproc {world_size}"));
        let what = format!("{args} --nproc {world_size}");
        assert_eq!(one.files(), many.files(), "{what}");
        for epoch in [1, 2] {
            let global = |trained: &Trained, world_size| {
                let mut batches = trained.global_batches(world_size, items, epoch);
                batches.iter_mut().for_each(|batch| batch.sort_unstable());
                batches
            };
            assert_eq!(global(&one, 1), global(&many, world_size), "{what}");
            for split in ["train", "valid"] {
                let what = format!("{what}: {split} epoch {epoch}");
                let pairs = |name| {
                    let (one, many) = (one.metric(split, epoch, name), many.metric(split, epoch, name));
                    assert_eq!(one.len(), many.len(), "{what} {name}");
                    one.into_iter().zip(many)
                };
                for ((one, items), (many, gathered)) in pairs("Loss") {
                    assert_close(one, many, &what);
                    assert_eq!(items, gathered, "{what}");
                }
                for (one, many) in pairs("Accuracy") {
                    let right = |(percent, items): (f64, usize)| (percent * items as f64 / 100.0).round();
                    assert_eq!((right(one), one.1), (right(many), many.1), "{what}");
                }
            }
        }
        let (one, many) = (one.tested(), many.tested());
        assert_eq!((one.0, one.1), (many.0, many.1), "{what}");
        assert_close(one.2, many.2, &what);
    }
}

#[test]
fn numbers_are_the_same_for_every_world_size() {
    for norm in ["none", "sync"] {
        compare(&format!("--norm {norm} --accumulate 1"), TRAIN);
    }
}

#[test]
fn numbers_are_the_same_with_accumulation_over_an_incomplete_window() {
    // Sixteen micro-steps: five windows of three, and one of one.
    for norm in ["none", "sync"] {
        compare(&format!("--norm {norm} --accumulate 3 --workers 3"), TRAIN);
    }
}

#[test]
fn numbers_are_the_same_where_the_last_micro_step_has_fewer_items_than_ranks() {
    for norm in ["none", "sync"] {
        compare(&format!("--norm {norm} --limit 129"), 129);
    }
}

#[test]
fn an_interrupted_run_ends_soon_and_does_not_look_like_a_success() {
    for (nproc, signal, code) in [
        ("", Signal::INT, 130),
        ("", Signal::TERM, 143),
        ("--nproc 2", Signal::INT, 130),
        ("--nproc 2", Signal::TERM, 143),
    ] {
        let bench = Bench::new();
        let mut command = bench.command("run", &format!("--limit 200 --epochs 1000000 {nproc}"));
        let started = Instant::now();
        let process = command.spawn().unwrap();
        // Both splits of an epoch: it trains.
        while !bench.0.path().join("run/valid/epoch-1/Loss.log").exists() {
            assert!(started.elapsed() < LIMIT, "{nproc}: no epoch ends");
            std::thread::sleep(Duration::from_millis(10));
        }
        let pid = Pid::from_child(&process);
        kill_process(pid, signal).unwrap();
        let output = finish(process, Duration::from_secs(10));
        assert_eq!(output.status.code(), Some(code), "{nproc} {signal:?}: {output:?}");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("stopped before the end") && !text.contains("test accuracy"), "{text}");
    }
}

#[test]
fn two_runs_do_not_share_a_directory() {
    let bench = Bench::new();
    let mut first = bench.command("run", "--limit 200 --epochs 1000000").spawn().unwrap();
    let started = Instant::now();
    while !bench.0.path().join("run/train").exists() {
        assert!(started.elapsed() < LIMIT, "the first run does not train");
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = run(bench.command("run", "--limit 200"));
    assert_refused(&output, &["--artifacts", "another run"]);
    assert!(first.try_wait().unwrap().is_none(), "the first run goes on");
    first.kill().unwrap();
    first.wait().unwrap();
}

#[test]
fn a_run_replaces_what_an_earlier_one_left() {
    let bench = Bench::new();
    let args = "--dropout 0 --limit 150 --epochs";
    bench.train("run", &format!("{args} 3"));
    let shorter = bench.train("run", &format!("{args} 1"));
    let epochs = shorter.files().into_iter().filter(|file| file.ends_with("Loss.log"));
    assert_eq!(epochs.collect::<Vec<_>>(), ["train/epoch-1/Loss.log", "valid/epoch-1/Loss.log"]);

    let output = run(bench.command("run", &format!("{args} 3 --resume 2")));
    assert_refused(&output, &["--resume 2", "model-2.mpk"]);
}

#[test]
fn a_resumed_run_goes_on_as_if_it_had_not_been_interrupted() {
    let bench = Bench::new();
    let args = "--dropout 0 --limit 150 --epochs";
    let whole = bench.train("whole", &format!("{args} 2"));
    for nproc in [1, 2] {
        bench.train("run", &format!("{args} 1"));
        let resumed = bench.train("run", &format!("{args} 2 --resume 1 --nproc {nproc}"));
        assert!(!resumed.text.contains("epoch 1/2"), "{}", resumed.text);
        assert_eq!(whole.files(), resumed.files());
        for (split, epoch) in [("train", 1), ("valid", 1), ("train", 2), ("valid", 2)] {
            let (whole, resumed) = (whole.metric(split, epoch, "Loss"), resumed.metric(split, epoch, "Loss"));
            assert_eq!(whole.len(), resumed.len(), "{split} {epoch}");
            for ((whole, _), (resumed, _)) in whole.into_iter().zip(resumed) {
                assert_close(whole, resumed, &format!("{split} {epoch}"));
            }
        }
    }
}

#[test]
fn the_backend_is_the_one_that_was_asked_for() {
    let bench = Bench::new();
    assert_backends_are_chosen(|args| bench.command("run", &format!("--epochs 1 --limit 96 {args}")));
}

#[test]
fn wrong_usage_is_one_line() {
    let bench = Bench::new();
    let cases = [
        ("--nproc 0", "--nproc 0"),
        ("--epochs 0", "--epochs 0"),
        ("--batch-size 0", "--batch-size 0"),
        ("--batch-size 18446744073709551615", "--batch-size 18446744073709551615"),
        ("--accumulate 0", "--accumulate 0"),
        ("--limit 0", "--limit 0"),
        ("--workers 9999999", "--workers 9999999"),
        ("--lr NaN", "--lr NaN"),
        ("--lr=-1", "--lr -1"),
        ("--dropout 1", "--dropout 1"),
        ("--dropout=-0.5", "--dropout -0.5"),
        ("--resume 2", "--resume 2 of --epochs 2"),
        ("--resume 1", "model-1.mpk"),
        ("--log-batches /no/such/directory/log", "/no/such/directory/log"),
    ];
    for (args, word) in cases {
        assert_refused(&run(bench.command("none", args)), &[word]);
    }
    let unknown = run(bench.command("none", "--norm layer"));
    assert_eq!(unknown.status.code(), Some(2), "{unknown:?}");
    assert!(!bench.0.path().join("none").exists());
    std::fs::write(bench.0.path().join("file"), b"").unwrap();
    assert_refused(&run(bench.command("file", "")), &["--artifacts", "not a directory"]);
}

#[test]
fn absent_data_are_one_line_that_says_where_to_get_them() {
    let directory = tempfile::tempdir().unwrap();
    let absent = directory.path().join("absent");
    for nproc in ["", "--nproc 2 "] {
        let output = run(command(PROGRAM, &format!("{nproc}--data {}", absent.display())));
        let path = absent.display().to_string();
        assert_refused(&output, &["train-images-idx3-ubyte.gz", &path, "dataset-fashion-mnist", "--data"]);
    }
}

#[test]
fn damaged_data_are_named_with_what_is_wrong() {
    let (pixels, labels) = images(TRAIN, 1);
    let whole = idx(&[TRAIN, 28, 28], &pixels);
    let gzipped = |bytes: &[u8]| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let compressed = gzipped(&whole);
    let mut flipped = compressed.clone();
    let last = flipped.len() - 6;
    flipped[last] ^= 1;
    let size = (TRAIN * PIXELS).to_string();
    let wrong_label: Vec<u8> = labels.iter().map(|label| label + 1).collect();
    let images_file = "train-images-idx3-ubyte.gz";
    let labels_file = "train-labels-idx1-ubyte.gz";
    let cases: [(&str, Vec<u8>, Vec<&str>); 10] = [
        (images_file, compressed[..compressed.len() / 2].to_vec(), vec!["cut off", &size]),
        (images_file, flipped, vec!["damaged"]),
        (images_file, b"not compressed at all".to_vec(), vec!["expected a gzip file"]),
        (images_file, Vec::new(), vec!["ends within its header"]),
        (images_file, gzipped(&whole[..whole.len() - 1]), vec![&size, "found 783999"]),
        (images_file, gzipped(&[&whole[..], &[0]].concat()), vec![&size, "more than that"]),
        (images_file, gzipped(&idx(&[TRAIN], &labels)), vec!["0x00000803", "0x00000801"]),
        (images_file, gzipped(&idx(&[TRAIN, 28, 27], &pixels)), vec!["[28, 28]", "[28, 27]"]),
        (labels_file, gzipped(&idx(&[TRAIN - 1], &labels[1..])), vec!["as many labels", "999, 1000"]),
        (labels_file, gzipped(&idx(&[TRAIN], &wrong_label)), vec!["labels from 0 to 9", "found 10"]),
    ];
    for (file, bytes, words) in cases {
        let bench = Bench::new();
        std::fs::write(bench.data().join(file), bytes).unwrap();
        let output = run(bench.command("none", ""));
        assert_refused(&output, &[&[file], &words[..]].concat());
        assert!(!bench.0.path().join("none").exists());
    }
}
