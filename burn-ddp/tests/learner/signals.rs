//! SIGINT and SIGTERM during a training and after it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::backend::Backend;
use burn_ddp::data::DataLoaderBuilder;
use burn_ddp::learner::{DdpStrategy, LaunchDdp};
use burn_ddp::{ProcessGroup, Result};
use rustix::process::Signal;

use crate::harness::{Case, Launch, argument, mark};
use crate::setup::*;

pub const CASES: &[(&str, Case)] = &[("signals after", signals_after), ("slow batch", slow_batch)];

/// Trains, then waits for a signal.
fn signals_after() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    for _ in 0..2 {
        let (train, valid) = loaders(&group, 10, 5, 0)?;
        let training = training(artifacts.path(), train, valid);
        training.launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    }
    mark("trained");
    std::thread::sleep(Duration::from_secs(20));
    Ok("deaf".into())
}

#[test]
fn after_a_training_signals_do_what_they_did_before() {
    use std::os::unix::process::ExitStatusExt;
    for (signal, number) in [(Signal::TERM, 15), (Signal::INT, 2)] {
        let ranks = Launch::new("signals after", 1).start();
        ranks.wait_for_mark(0, "trained");
        ranks.signal(0, signal);
        let outcome = ranks.wait().remove(0);
        assert_eq!(outcome.status.signal(), Some(number), "{outcome:?}");
    }
}

/// A batcher whose third batch takes as many milliseconds as the argument says.
#[derive(Clone)]
struct Slow(Arc<AtomicUsize>);

impl<B: Backend> Batcher<B, usize, Batch<B>> for Slow {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Batch<B> {
        if self.0.fetch_add(1, Ordering::SeqCst) == 2 {
            mark("third");
            std::thread::sleep(Duration::from_millis(argument().parse().expect("milliseconds")));
        }
        Batches.batch(items, device)
    }
}

fn slow_batch() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let (_, valid) = loaders(&group, 10, 5, 0)?;
    let train = DataLoaderBuilder::new(Slow(Arc::default()), &group).batch_size(5).build(Items(5_000_000))?;
    training(artifacts.path(), train, valid)
        .launch_ddp(&DdpStrategy::new(&group), learner(&group, &NetConfig::new())?)?;
    Ok("stopped".into())
}

#[test]
fn a_signal_that_comes_twice_at_once_is_one_wish_to_stop_and_a_later_one_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;
    let ranks = Launch::new("slow batch", 1).argument(100).start();
    ranks.wait_for_mark(0, "third");
    for _ in 0..5 {
        ranks.signal(0, Signal::TERM);
        // A signal that is still pending would merge with the next one.
        std::thread::sleep(Duration::from_millis(5));
    }
    let outcome = ranks.wait().remove(0);
    assert!(outcome.status.success() && outcome.text == "stopped", "{outcome:?}");

    let ranks = Launch::new("slow batch", 1).argument(30_000).start();
    ranks.wait_for_mark(0, "third");
    let start = Instant::now();
    // Until it must have seen two that are apart; one that has ended takes more.
    while start.elapsed() < Duration::from_secs(1) {
        ranks.signal(0, Signal::TERM);
        std::thread::sleep(Duration::from_millis(20));
    }
    let outcome = ranks.wait().remove(0);
    assert_eq!(outcome.status.signal(), Some(15), "{outcome:?}");
    assert!(start.elapsed() < Duration::from_secs(10));
}
