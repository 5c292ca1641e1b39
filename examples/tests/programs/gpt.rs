//! The program `gpt`: run as users run it, and its parts.

#[path = "../../src/bin/gpt/main.rs"]
#[allow(dead_code)]
mod program;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Output};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::module::Module;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{GradientsParams, Optimizer, SimpleOptimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_ddp::{Ddp, ProcessGroup};
use burn_dispatch::{Dispatch, DispatchDevice};
use burn_flex::{Flex, FlexDevice};
use clap::Parser;
use serde_json::Value;

use crate::process::{
    LIMIT, assert_backends_are_chosen, assert_refused, command, finish, kill, ranks_of, run, stdout,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_gpt");
/// A model that trains in seconds in a build without optimization; four micro-batches are a global batch.
const TINY: &str =
    "--layers 1 --heads 2 --embd 16 --batch-size 2 --seq-len 16 --total-batch-tokens 128 --seed 7";

/// Held by a test that trains in this process. Burn may lose a gradient when two threads of a process run `backward()`
/// at once.
static TRAINING: Mutex<()> = Mutex::new(());

/// `gpt` with a tiny model, `args` added, and its text in `directory`: so short that 30 steps meet its end.
fn tiny(directory: &Path, args: &str) -> std::process::Command {
    let text = directory.join("text.txt");
    std::fs::write(&text, &include_str!("../../data/new-testament.txt")[..3000]).unwrap();
    let mut command = command(PROGRAM, &format!("{TINY} {args} --data"));
    command.arg(text);
    command
}

fn records(log: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(log).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Runs `args` with a log and returns standard output and the log's records.
fn logged(args: &str) -> (String, Vec<Value>) {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log.json");
    let mut command = tiny(directory.path(), args);
    command.arg("--log-json").arg(&log);
    let text = stdout(&run(command));
    (text, records(&log))
}

fn assert_close(a: f64, b: f64, what: &str) {
    assert!((a - b).abs() <= 1e-5 * a.abs().max(b.abs()), "{what}: {a} and {b}");
}

fn number(record: &Value, field: &str) -> f64 {
    record[field].as_f64().unwrap_or_else(|| panic!("{record} has no number {field}"))
}

#[test]
fn numbers_are_the_same_for_every_world_size() {
    let (_, alone) = logged("--steps 30 --warmup-steps 5 --lr 1e-2");
    for nproc in [1, 2, 4] {
        let (text, records) = logged(&format!("--steps 30 --warmup-steps 5 --lr 1e-2 --nproc {nproc}"));
        assert!(text.contains(&format!("equal on all {nproc} ranks")), "{text}");
        assert_eq!(records.len(), 30);
        for (step, (one, many)) in alone.iter().zip(&records).enumerate() {
            let fields: Vec<_> = many.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(fields, ["dt_ms", "loss", "lr", "norm", "step", "tokens_per_sec", "world_size"]);
            assert_eq!((&many["step"], &many["world_size"]), (&step.into(), &nproc.into()));
            for field in ["loss", "norm", "lr"] {
                assert_close(number(one, field), number(many, field), &format!("{field} of step {step}"));
            }
        }
    }
    assert!(number(&alone[29], "loss") < number(&alone[0], "loss") - 0.5);
}

#[test]
fn reproducible_runs_are_the_same_to_the_last_bit() {
    // The parts of the log that do not depend on time, and the parameter hash.
    let told = |args: &str| {
        let (text, records) = logged(&format!("--steps 30 --warmup-steps 5 --lr 1e-2 {args}"));
        assert_eq!(records.len(), 30, "{text}");
        let lines =
            text.lines().filter_map(|line| line.split_once(" | dt ").map(|(line, _)| line.to_string()));
        let mut told: Vec<String> = lines.collect();
        assert_eq!(told.len(), 30, "{text}");
        // Printed as they are stored: with as many digits as it takes to tell one f64 from any other.
        told.extend(
            records.iter().map(|record| format!("{} {} {}", record["loss"], record["norm"], record["lr"])),
        );
        told.extend(text.lines().filter(|line| line.contains("held-out loss ")).map(String::from));
        let hash = text.split_once("parameter hash ").expect("a hash").1;
        told.push(hash.split_once(',').expect("one hash").0.to_string());
        told
    };
    let mut runs = Vec::new();
    for dropout in ["", "--dropout 0.1"] {
        let run = |nproc: usize| told(&format!("--reproducible --eval-every 30 --nproc {nproc} {dropout}"));
        let one = run(1);
        assert_eq!(one.len(), 62);
        for nproc in [2, 4] {
            assert_eq!(run(nproc), one, "--nproc {nproc} {dropout}");
        }
        runs.push(one);
    }
    assert_ne!(runs[0], runs[1]);
    // And a training it is.
    let loss = |line: &str| line.split(' ').next().and_then(|loss| loss.parse::<f64>().ok()).expect("a loss");
    assert!(runs.iter().all(|run| loss(&run[59]) < loss(&run[30]) - 0.4));
}

/// Burn's own backend. With overlap a bare `Autodiff<Flex>` is no backend that can be differentiated.
#[cfg(not(feature = "overlap"))]
type Plain = Autodiff<Flex>;
#[cfg(feature = "overlap")]
type Plain = Autodiff<Ddp<Flex>>;

#[test]
fn a_world_of_one_is_the_plain_loop_bit_for_bit() {
    let _training = TRAINING.lock().unwrap_or_else(PoisonError::into_inner);
    let flags = "--layers 1 --heads 2 --embd 16 --batch-size 4 --seq-len 16 --total-batch-tokens 64 --clip 0";
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log.json");
    let mut command = command(PROGRAM, &format!("{flags} --steps 12 --log-json"));
    command.arg(&log);
    stdout(&run(command));

    let args = program::args::Args::parse_from(format!("gpt {flags} --steps 12").split_whitespace());
    let plan = program::plan::Plan::new(&args, 1).unwrap();
    let device = FlexDevice;
    Plain::seed(&device, args.seed);
    let mut model = program::model::Gpt::<Plain>::new(&plan.model, &device);
    let mut optimizer = OptimizerAdaptor::from(program::optimizer::DecayMatrices::new(args.weight_decay));
    for record in records(&log) {
        let step = record["step"].as_u64().unwrap() as usize;
        let stretch = program::text::stretch(plan.text.train.len(), 64, 64, step, 0);
        let (inputs, targets) = program::text::batch(&plan.text.train[stretch], args.seq_len, &device);
        let loss = model.loss(inputs, targets);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model =
            optimizer.step(program::optimizer::learning_rate(args.lr, args.warmup(), 12, step), model, grads);
        assert_eq!(number(&record, "loss"), f64::from(loss.into_scalar()), "step {step}");
    }
}

#[test]
fn everything_is_on_the_device_of_the_rank() {
    let _training = TRAINING.lock().unwrap_or_else(PoisonError::into_inner);
    // The default is Flex; a tensor of one cannot be combined with one of the other.
    let device = DispatchDevice::NdArray(Default::default());
    assert_ne!(device, DispatchDevice::default());
    let flags =
        "--layers 1 --heads 2 --embd 16 --batch-size 2 --seq-len 16 --total-batch-tokens 64 --steps 2";
    let args = program::args::Args::parse_from(format!("gpt {flags} --eval-every 2").split(' '));
    let mut plan = program::plan::Plan::new(&args, 1).unwrap();
    // A few windows: the loss of a tenth of the text takes long in a build without optimization.
    plan.text.held_out.truncate(100);
    let group = ProcessGroup::<Ddp<Dispatch>>::solo(&device);
    program::train::train(&group, &args, &plan).unwrap();
}

/// Starts `command` and returns when it has printed `lines` steps, with the rest of its output still to come.
fn start(mut command: std::process::Command, lines: usize) -> Child {
    let mut child = command.spawn().unwrap();
    let mut reader = BufReader::with_capacity(1, child.stdout.take().unwrap());
    let mut line = String::new();
    let mut seen = 0;
    while seen < lines {
        line.clear();
        assert!(reader.read_line(&mut line).unwrap() > 0, "{:?}", finish(child, LIMIT));
        seen += usize::from(line.contains("| loss "));
    }
    // Somebody must go on reading, or the program would stop at a full pipe.
    std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
    child
}

#[test]
fn a_world_of_one_opens_no_socket() {
    let directory = tempfile::tempdir().unwrap();
    let child = start(tiny(directory.path(), "--steps 1000000"), 3);
    let links: Vec<_> = std::fs::read_dir(format!("/proc/{}/fd", child.id()))
        .unwrap()
        .map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap().display().to_string())
        .collect();
    kill(child.id());
    finish(child, LIMIT);
    assert!(links.len() >= 3 && !links.iter().any(|link| link.starts_with("socket:")), "{links:?}");
}

#[test]
fn a_killed_rank_ends_the_run_and_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log.json");
    let mut command = tiny(directory.path(), "--steps 1000000 --nproc 2");
    command.arg("--log-json").arg(&log);
    let launcher = start(command, 3);
    let ranks = ranks_of(launcher.id());
    assert_eq!(ranks.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [0, 1]);

    let killed = Instant::now();
    kill(ranks[1].1);
    let output = finish(launcher, LIMIT);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(killed.elapsed() < Duration::from_secs(5), "{:?}: {errors}", killed.elapsed());
    assert_eq!(output.status.code(), Some(137), "{errors}");
    assert!(errors.lines().any(|line| line.contains("gpt: ") && line.contains("rank 1")), "{errors}");
    for (rank, id) in ranks {
        assert!(!Path::new(&format!("/proc/{id}")).exists(), "rank {rank} is left");
    }
    // Every step that was logged is there, whole.
    let steps: Vec<_> = records(&log).iter().map(|record| record["step"].as_u64().unwrap()).collect();
    assert!(steps.len() >= 3 && steps.iter().copied().eq(0..steps.len() as u64));
}

#[test]
fn the_other_backend_and_the_other_tokenizer_train() {
    for args in ["--backend ndarray", "--tokenizer gpt2"] {
        let (text, records) = logged(&format!("{args} --steps 2 --nproc 2"));
        assert_eq!(records.len(), 2, "{args}: {text}");
        assert!(records.iter().all(|record| number(record, "loss").is_finite()), "{args}: {text}");
    }
}

#[test]
fn the_backend_is_the_one_that_was_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    assert_backends_are_chosen(|args| tiny(directory.path(), &format!("--steps 2 {args}")));
}

#[test]
fn which_device_a_rank_drives_is_on_record() {
    let directory = tempfile::tempdir().unwrap();
    let mut logged = tiny(directory.path(), "--steps 1 --nproc 2");
    logged.env("RUST_LOG", "burn_ddp=info");
    let output = run(logged);
    let log = String::from_utf8_lossy(&output.stderr);
    for rank in 0..2 {
        let line = format!("rank {rank} of 2: device Cpu");
        assert_eq!(log.matches(&line).count(), 1, "{line}: {log}");
    }
}

#[test]
fn the_smallest_gpt_2_fits_the_default_text() {
    let flags = "--layers 12 --heads 12 --embd 768 --seq-len 1024 --tokenizer gpt2 --batch-size 1";
    let args = program::args::Args::parse_from(format!("gpt {flags}").split(' '));
    let plan = program::plan::Plan::new(&args, 2).unwrap();
    assert_eq!((plan.micro_batch, plan.accumulation), (1024, 1));
    // Tokens, positions, twelve blocks and the last norm; the head is the embedding of the tokens.
    let (width, block) = (768, 12 * 768 * 768 + 13 * 768);
    let expected = 50_257 * width + 1024 * width + 12 * block + 2 * width;
    assert_eq!(expected, 124_439_808);
    assert_eq!(program::model::Gpt::<Flex>::new(&plan.model, &FlexDevice).num_params(), expected);
}

#[test]
fn held_out_loss_does_not_depend_on_the_world_size() {
    let held_out = |args: &str| -> Vec<f64> {
        let (text, records) = logged(&format!("--steps 4 --eval-every 2 {args}"));
        assert_eq!(records.len(), 4);
        let numbers = text.lines().filter_map(|line| line.split_once("held-out loss "));
        numbers.map(|(_, number)| number.trim().parse().unwrap()).collect()
    };
    let (one, two) = (held_out(""), held_out("--nproc 2"));
    assert_eq!((one.len(), two.len()), (2, 2));
    one.iter().zip(&two).for_each(|(one, two)| assert_close(*one, *two, "held-out loss"));
}

/// Ranks of one world, each started by hand with arguments of its own.
fn by_hand(args: [&str; 2]) -> Vec<Output> {
    let directory = tempfile::tempdir().unwrap();
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = held.local_addr().unwrap().port().to_string();
    drop(held);
    let children: Vec<_> = args
        .iter()
        .enumerate()
        .map(|(rank, args)| {
            let mut command = tiny(directory.path(), args);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2").env("MASTER_ADDR", "127.0.0.1");
            command.env("MASTER_PORT", &port).spawn().unwrap()
        })
        .collect();
    children.into_iter().map(|child| finish(child, LIMIT)).collect()
}

#[test]
fn ranks_with_different_arguments_do_not_train() {
    for output in by_hand(["--steps 3", "--steps 3 --lr 0.5"]) {
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        assert!(text.contains("rank 0 was given") && text.contains("--lr 0.5"), "{text}");
    }
}

#[test]
fn a_rank_that_cannot_write_says_so_to_all() {
    for args in ["--steps 3 --log-json /dev/full", "--steps 3 --log-json /dev/full --nproc 2"] {
        let output = run(command(PROGRAM, &format!("{TINY} {args}")));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("--log-json /dev/full: cannot write") && !text.contains("panicked"), "{text}");
        assert!(!text.contains("already finished"), "{text}");
    }
    let full = std::fs::File::create("/dev/full").unwrap();
    let mut program = command(PROGRAM, &format!("{TINY} --steps 3"));
    program.stdout(full);
    let output = run(program);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("cannot write to standard output") && !text.contains("panicked"), "{text}");
}

#[test]
fn wrong_input_is_one_line_and_writes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let empty = file("empty", b"");
    let short = file("short", &[b'a'; 2275]);
    let binary = file("binary", b"abc\xff");
    let pipe = directory.path().join("pipe").display().to_string();
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let cases = [
        ("--nproc 0", vec!["--nproc 0"]),
        ("--total-batch-tokens 2000 --nproc 2", vec!["2000", "= 1024", "1024 or 2048"]),
        ("--total-batch-tokens 100", vec!["100", "use 512"]),
        ("--total-batch-tokens 0", vec!["--total-batch-tokens 0"]),
        ("--seq-len 0", vec!["--seq-len 0"]),
        ("--batch-size 0", vec!["--batch-size 0"]),
        ("--batch-size 9999999999999999999 --seq-len 9", vec!["--batch-size"]),
        ("--steps 0", vec!["--steps 0"]),
        ("--heads 0", vec!["--heads 0"]),
        ("--embd 100 --heads 3", vec!["--embd 100", "--heads 3", "99 or 102"]),
        ("--embd 18446744073709551614", vec!["--embd 18446744073709551614"]),
        ("--layers 1000000 --embd 1000000", vec!["--layers 1000000", "--embd 1000000"]),
        ("--nproc 18446744073709551615", vec!["--nproc 18446744073709551615"]),
        ("--lr NaN", vec!["--lr NaN"]),
        ("--clip=-1", vec!["--clip -1"]),
        ("--dropout 1", vec!["--dropout 1"]),
        ("--dropout NaN", vec!["--dropout NaN"]),
        ("--reproducible --nproc 3", vec!["--reproducible with 3 processes", "2 or 4"]),
        ("--log-json /no/such/directory/log", vec!["--log-json", "/no/such/directory/log"]),
        ("--data /no/such/file", vec!["--data /no/such/file"]),
        (&format!("--data {empty}"), vec!["empty"]),
        (&format!("--data {short}"), vec!["2048 tokens", "takes 2048 and one"]),
        (&format!("--data {binary}"), vec!["not UTF-8 at byte 3"]),
        (&format!("--data {short} --total-batch-tokens 1024 --eval-every 1"), vec!["--eval-every"]),
        (&format!("--data {short} --log-json {short}"), vec!["--log-json", "the text of --data"]),
        (&format!("--data {pipe}"), vec!["--data", "pipe"]),
        (&format!("--log-json {pipe}"), vec!["--log-json"]),
    ]
    .map(|(args, words)| (args.to_string(), words));
    let log = directory.path().join("log.json");
    for (args, words) in cases {
        for nproc in ["", "--nproc 2 "] {
            if args.contains("--nproc") && !nproc.is_empty() {
                continue;
            }
            let mut command = command(PROGRAM, &format!("{nproc}{args}"));
            if !args.contains("--log-json") {
                command.arg("--log-json").arg(&log);
            }
            assert_refused(&run(command), if nproc.is_empty() { &words } else { &words[..1] });
            assert!(!log.exists(), "{args} wrote a log");
        }
    }
}

#[test]
fn accumulation_follows_from_the_total_or_proposes_others() {
    for (total, world_size, expected) in [(2048, 1, 4), (2048, 2, 2), (2048, 4, 1), (1536, 3, 1)] {
        assert_eq!(program::plan::accumulation(total, 8, 64, world_size).unwrap(), expected);
    }
    for (total, world_size, proposal) in [(2048, 3, "use 1536 or 3072"), (500, 1, "use 512")] {
        let error = program::plan::accumulation(total, 8, 64, world_size).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().ends_with(proposal), "{error}");
    }
}

#[test]
fn micro_batches_of_all_ranks_are_the_global_batch_in_order() {
    let (train, total, micro_batch) = (1000, 128, 32);
    for world_size in [1, 2, 4] {
        let accumulation = program::plan::accumulation(total, 2, 16, world_size).unwrap();
        for step in 0..20 {
            let stretches: Vec<_> = (0..world_size)
                .flat_map(|rank| rank * accumulation..(rank + 1) * accumulation)
                .map(|micro| program::text::stretch(train, total, micro_batch, step, micro))
                .collect();
            // 999 tokens have a successor, which makes seven global batches before the text starts again.
            let start = step % 7 * total;
            let expected: Vec<_> = (0..4).map(|i| start + i * 32..start + i * 32 + 33).collect();
            assert_eq!(stretches, expected, "step {step} of world size {world_size}");
        }
    }
    assert_eq!(program::text::stretch(129, 128, 128, 5, 0), 0..129);
}

#[test]
fn targets_are_the_inputs_one_token_on() {
    let (inputs, targets) = program::text::batch::<Flex>(&[0, 1, 2, 3, 4, 5, 6], 3, &FlexDevice);
    assert_eq!(inputs.into_data().to_vec::<i32>().unwrap(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(targets.into_data().to_vec::<i32>().unwrap(), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn attention_does_not_see_the_future() {
    let config =
        program::model::GptConfig { vocab: 5, seq_len: 4, layers: 2, heads: 2, embd: 8, dropout: 0.1 };
    let model = program::model::Gpt::<Flex>::new(&config, &FlexDevice);
    let logits = |tokens: [i32; 4]| {
        let logits = model.logits(Tensor::from_ints([tokens], &FlexDevice));
        logits.into_data().to_vec::<f32>().unwrap()
    };
    let (one, other) = (logits([1, 2, 3, 4]), logits([1, 2, 3, 0]));
    assert_eq!(one[..15], other[..15]);
    assert_ne!(one[15..], other[15..]);
}

#[test]
fn the_text_is_tokenized_and_split() {
    let text = program::text::Text::new("abacabadab", program::text::Tokenizer::Char).unwrap();
    assert_eq!(
        (text.vocab, &text.train[..], &text.held_out[..]),
        (4, &[0, 1, 0, 2, 0, 1, 0, 3, 0][..], &[1][..])
    );
    let even = program::text::Text::new("abab", program::text::Tokenizer::Char).unwrap();
    assert!((even.unigram_entropy - 2.0_f64.ln()).abs() < 1e-12);
}

#[test]
fn the_schedule_warms_up_and_falls_to_a_tenth() {
    let rate = |step| program::optimizer::learning_rate(1.0, 10, 110, step);
    assert_close(rate(0), 0.1, "first");
    assert_close(rate(9), 1.0, "end of warm-up");
    assert_close(rate(10), 1.0, "peak");
    assert_close(rate(60), 0.55, "half way");
    assert!(rate(109) > 0.1 && rate(109) < 0.101);
    assert!((11..110).all(|step| rate(step) < rate(step - 1)));
    assert_close(program::optimizer::learning_rate(1.0, 0, 1, 0), 1.0, "no warm-up");
    assert_close(program::optimizer::learning_rate(1.0, 20, 10, 9), 0.5, "nothing but warm-up");
}

#[test]
fn only_matrices_decay() {
    let optimizer = program::optimizer::DecayMatrices::new(0.5);
    let (matrix, _) = SimpleOptimizer::<Flex>::step(
        &optimizer,
        0.1,
        Tensor::<Flex, 2>::ones([2, 2], &FlexDevice),
        Tensor::zeros([2, 2], &FlexDevice),
        None,
    );
    let (vector, _) = SimpleOptimizer::<Flex>::step(
        &optimizer,
        0.1,
        Tensor::<Flex, 1>::ones([2], &FlexDevice),
        Tensor::zeros([2], &FlexDevice),
        None,
    );
    assert_eq!(matrix.into_data().to_vec::<f32>().unwrap(), [0.95; 4]);
    assert_eq!(vector.into_data().to_vec::<f32>().unwrap(), [1.0; 2]);
}
