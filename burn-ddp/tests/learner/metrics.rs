//! Every number that rank 0 shows is that of the whole global batch, and only rank 0 writes files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn::train::metric::{
    AccuracyMetric, Adaptor, ClassReduction, HammingScore, LossInput, LossMetric, Metric, MetricMetadata,
    MetricName, Numeric, NumericEntry, PrecisionMetric, SerializedEntry,
};
use burn::train::{
    ClassificationOutput, InferenceStep, ItemLazy, Learner, MultiLabelClassificationOutput, RegressionOutput,
    SequenceOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_ddp::data::DataLoaderBuilder;
use burn_ddp::learner::{DdpOutput, DdpStrategy, GlobalParts, LaunchDdp, Parts, PlainRenderer};
use burn_ddp::{ProcessGroup, Result};
use burn_flex::Flex;

use crate::harness::{Case, Launch, argument};
use crate::setup::*;

pub const CASES: &[(&str, Case)] = &[
    ("files", all_files),
    ("exact", exact),
    ("weighted", weighted),
    ("outputs", outputs),
    ("limited", limited),
    ("dropout", dropout),
];

/// Trains in the folder of the argument, with everything that writes files.
fn all_files() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let argument = argument();
    let (accumulation, folder) = argument.split_once(' ').expect("accumulation and a folder");
    let (train, valid) = loaders(&group, 21, 5, 1)?;
    training(&PathBuf::from(folder), train, valid)
        .metric_train_numeric(PrecisionMetric::<Flex>::multiclass(1, ClassReduction::Macro))
        .num_epochs(2)
        .grads_accumulation(accumulation.parse().expect("a number"))
        .summary()
        .launch_ddp(
            &DdpStrategy::new(&group),
            learner(&group, &NetConfig::new().with_norm("sync".into()))?,
        )?;
    Ok(String::new())
}

/// Numbers of all lines of a metric file: a value and, after the comma, the number of its items.
fn values(artifacts: &Path, split: &str, epoch: usize, metric: &str) -> Vec<f64> {
    let lines = lines(artifacts, split, epoch, metric);
    lines.iter().flat_map(|line| line.split(',').map(|word| word.parse().expect("a number"))).collect()
}

#[test]
fn metric_files_are_those_of_one_process_and_only_rank_0_leaves_any() {
    let folders = tempfile::tempdir().expect("a folder");
    for accumulation in [1, 3] {
        let path = |world: usize, rank: &str| folders.path().join(format!("{accumulation}-{world}-{rank}"));
        for world in 1..=3 {
            let argument = format!("{accumulation} {}", path(world, "{rank}").display());
            Launch::new("files", world).argument(argument).succeed();
            let mine = path(world, "0");
            for (split, metrics) in [
                ("train", &["Loss", "Accuracy", "Precision_@_TopK(1)_[Macro]"][..]),
                ("valid", &["Loss", "Accuracy"]),
            ] {
                for epoch in 1..=2 {
                    for metric in metrics {
                        let got = values(&mine, split, epoch, metric);
                        // One line for each of the five micro-steps.
                        assert_eq!(
                            lines(&mine, split, epoch, metric).len(),
                            5,
                            "world {world}, {split}, {metric}"
                        );
                        let wanted = values(&path(1, "0"), split, epoch, metric);
                        close(&format!("world {world}, {split}, {metric}"), &got, &wanted, 1e-5);
                    }
                }
            }
            for rank in 1..world {
                let left = files(&path(world, &rank.to_string()));
                assert!(left.is_empty(), "rank {rank} of {world} leaves {left:?}");
            }
        }
    }
}

#[test]
fn of_ranks_that_are_first_on_their_machines_rank_0_alone_writes() {
    let folders = tempfile::tempdir().expect("a folder");
    let argument = format!("1 {}", folders.path().join("{rank}").display());
    Launch::new("files", 2).argument(argument).env("LOCAL_RANK", 0).env("LOCAL_WORLD_SIZE", 1).succeed();
    assert!(!files(&folders.path().join("0")).is_empty());
    assert!(files(&folders.path().join("1")).is_empty());
}

/// Predicts class 0 for item 0 and the right class for all others.
#[derive(Clone)]
struct OneWrong;

#[derive(Module, Debug)]
struct Known<B: Backend> {
    w: Param<Tensor<B, 1>>,
}

impl<B: Backend> Known<B> {
    fn new(device: &B::Device) -> Self {
        Self { w: Param::from_tensor(Tensor::zeros([1], device)) }
    }
}

#[derive(Clone, Debug)]
struct Scores<B: Backend> {
    scores: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
}

impl<B: Backend> Batcher<B, usize, Scores<B>> for OneWrong {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Scores<B> {
        let scores: Vec<f32> =
            items.iter().flat_map(|item| if *item == 0 { [1., 0.] } else { [0., 1.] }).collect();
        let count = items.len();
        Scores {
            scores: Tensor::from_data(TensorData::new(scores, [count, 2]), device),
            targets: Tensor::from_data(TensorData::new(vec![1; count], [count]), device),
        }
    }
}

impl<B: Backend> Known<B> {
    fn forward(&self, batch: Scores<B>) -> ClassificationOutput<B> {
        // A marked parameter cannot be the root of a backward pass (`docs/footguns.md`).
        ClassificationOutput::new(self.w.val() * 1.0, batch.scores, batch.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Known<B> {
    type Input = Scores<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Scores<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Known<B> {
    type Input = Scores<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Scores<B>) -> ClassificationOutput<B> {
        self.forward(batch)
    }
}

/// Items counted and items right in the validation of 21 items.
fn exact() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let train = DataLoaderBuilder::new(OneWrong, &group).batch_size(4).build(Items(21))?;
    let valid = DataLoaderBuilder::new(OneWrong, &group).batch_size(4).build(Items(21))?;
    let training = SupervisedTraining::new(artifacts.path(), train, valid)
        .metrics((AccuracyMetric::<Flex>::new(),))
        .renderer(PlainRenderer::to(std::io::sink()))
        .with_application_logger(None);
    let learner =
        Learner::new(Known::<B>::new(group.device()), SgdConfig::new().init(), ConstantLr::new(0.1));
    training.launch_ddp(&DdpStrategy::new(&group), learner)?;
    if !group.rank().is_root() {
        return Ok(String::new());
    }
    let values = values(artifacts.path(), "valid", 1, "Accuracy");
    let counted: f64 = values.chunks(2).map(|line| line[1]).sum();
    let right: f64 = values.chunks(2).map(|line| line[0] / 100.0 * line[1]).sum();
    Ok(format!("{counted} {right}"))
}

#[test]
fn validation_counts_every_item_once() {
    for world in 1..=4 {
        let text = Launch::new("exact", world).succeed().remove(0);
        close(&format!("world {world}"), &read(&text), &[21.0, 20.0], 1e-6);
    }
}

/// An output of a user's own: its loss is the mean of the batch's numbers, and it can be asked for their sum.
struct Own<B: Backend> {
    loss: Tensor<B, 1>,
    numbers: Tensor<B, 1>,
}

impl<B: Backend> ItemLazy for Own<B> {
    type ItemSync = Own<Flex>;

    fn sync(self) -> Own<Flex> {
        let device = &Default::default();
        Own {
            loss: Tensor::from_data(self.loss.into_data(), device),
            numbers: Tensor::from_data(self.numbers.into_data(), device),
        }
    }
}

impl<B: Backend> Adaptor<LossInput<B>> for Own<B> {
    fn adapt(&self) -> LossInput<B> {
        LossInput::new(self.loss.clone())
    }
}

impl<B: Backend> Adaptor<Vec<f64>> for Own<B> {
    fn adapt(&self) -> Vec<f64> {
        self.numbers.to_data().iter::<f64>().collect()
    }
}

// The test in `compile_error.rs` compiles this file without the implementation.
#[cfg(not(feature = "__without_ddp_output"))]
impl<B: Backend> DdpOutput for Own<B> {
    fn items(&self) -> usize {
        self.numbers.dims()[0]
    }

    fn parts(self) -> Parts {
        Parts::new().with_loss(self.loss).with(self.numbers)
    }

    fn join(mut parts: GlobalParts) -> Result<Self> {
        Ok(Self { loss: parts.loss()?, numbers: parts.cat()? })
    }
}

/// A user's metric: no item mean, so pairs of value and count could not be averaged.
#[derive(Clone)]
struct Largest(f64);

impl Metric for Largest {
    type Input = Vec<f64>;

    fn name(&self) -> MetricName {
        Arc::new("Largest".into())
    }

    fn update(&mut self, numbers: &Vec<f64>, _: &MetricMetadata) -> SerializedEntry {
        self.0 = numbers.iter().copied().fold(f64::MIN, f64::max);
        SerializedEntry::new(self.0.to_string(), self.0.to_string())
    }

    fn clear(&mut self) {}
}

impl Numeric for Largest {
    fn value(&self) -> NumericEntry {
        NumericEntry::Value(self.0)
    }

    fn running_value(&self) -> NumericEntry {
        self.value()
    }
}

#[derive(Clone)]
pub struct Numbers(pub Vec<f32>);

impl<B: Backend> Batcher<B, usize, Tensor<B, 1>> for Numbers {
    fn batch(&self, items: Vec<usize>, device: &B::Device) -> Tensor<B, 1> {
        let values: Vec<f32> = items.iter().map(|item| self.0[*item]).collect();
        Tensor::from_data(TensorData::from(values.as_slice()), device)
    }
}

#[derive(Module, Debug)]
struct Mean<B: Backend> {
    w: Param<Tensor<B, 1>>,
}

impl<B: Backend> Mean<B> {
    fn forward(&self, numbers: Tensor<B, 1>) -> Own<B> {
        Own { loss: (self.w.val() + numbers.clone()).mean(), numbers }
    }
}

impl<B: AutodiffBackend> TrainStep for Mean<B> {
    type Input = Tensor<B, 1>;
    type Output = Own<B>;

    fn step(&self, numbers: Tensor<B, 1>) -> TrainOutput<Own<B>> {
        let output = self.forward(numbers);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Mean<B> {
    type Input = Tensor<B, 1>;
    type Output = Own<B>;

    fn step(&self, numbers: Tensor<B, 1>) -> Own<B> {
        self.forward(numbers)
    }
}

/// Rank 0 has three items of loss 1, rank 1 one of loss 5, in loaders that are each rank's own.
fn weighted() -> Result<String> {
    use burn::data::dataloader::DataLoaderBuilder as PlainBuilder;
    use burn_ddp::data::local;
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let mine = if group.rank().is_root() { vec![1.0; 3] } else { vec![5.0] };
    let train = PlainBuilder::<B, _, _>::new(Numbers(mine.clone())).batch_size(3).build(Items(mine.len()));
    let valid = PlainBuilder::<G, _, _>::new(Numbers(mine.clone())).batch_size(3).build(Items(mine.len()));
    let training = SupervisedTraining::new(artifacts.path(), local(train, &group), local(valid, &group))
        .metrics((LossMetric::<Flex>::new(), Largest(0.0)))
        .renderer(PlainRenderer::to(std::io::sink()))
        .with_application_logger(None);
    let model = Mean::<B> { w: Param::from_tensor(Tensor::zeros([1], group.device())) };
    let learner = Learner::new(model, SgdConfig::new().init(), ConstantLr::new(1e-9));
    training.launch_ddp(&DdpStrategy::new(&group), learner)?;
    if !group.rank().is_root() {
        return Ok(String::new());
    }
    let of = |split: &str, metric: &str| tell(&values(artifacts.path(), split, 1, metric));
    Ok(["train", "valid"].map(|split| format!("{} {}", of(split, "Loss"), of(split, "Largest"))).join(" "))
}

#[test]
fn losses_are_weighted_by_items_and_own_outputs_and_metrics_are_global() {
    let text = Launch::new("weighted", 2).succeed().remove(0);
    // One record a split: the loss of four items, and the largest of all.
    close("weighted", &read(&text), &[2.0, 4.0, 5.0, 2.0, 4.0, 5.0], 1e-6);
}

/// A model that returns any of Burn's outputs.
macro_rules! model_with_output {
    ($name:ident, $output:ident, $make:expr) => {
        #[derive(Module, Debug)]
        pub struct $name<B: Backend> {
            pub w: Param<Tensor<B, 1>>,
        }

        impl<B: Backend> $name<B> {
            fn forward(&self, numbers: Tensor<B, 1>) -> $output<B> {
                let make: fn(Tensor<B, 1>, Tensor<B, 1>) -> $output<B> = $make;
                make((self.w.val() * numbers.clone()).mean(), numbers)
            }
        }

        impl<B: AutodiffBackend> TrainStep for $name<B> {
            type Input = Tensor<B, 1>;
            type Output = $output<B>;

            fn step(&self, numbers: Tensor<B, 1>) -> TrainOutput<$output<B>> {
                let output = self.forward(numbers);
                TrainOutput::new(self, output.loss.backward(), output)
            }
        }

        impl<B: Backend> InferenceStep for $name<B> {
            type Input = Tensor<B, 1>;
            type Output = $output<B>;

            fn step(&self, numbers: Tensor<B, 1>) -> $output<B> {
                self.forward(numbers)
            }
        }
    };
}

model_with_output!(Scale, RegressionOutput, |loss, x| {
    let column = x.unsqueeze_dim::<2>(1);
    RegressionOutput::new(loss, column.clone(), column)
});
model_with_output!(Labeller, MultiLabelClassificationOutput, |loss, x| {
    let scores = x.unsqueeze_dim::<2>(1).repeat_dim(1, 2);
    MultiLabelClassificationOutput::new(loss, scores.clone(), scores.greater_elem(2.0).int())
});
model_with_output!(Speaker, SequenceOutput, |loss, x| {
    let tokens = x.unsqueeze_dim::<2>(1).repeat_dim(1, 3);
    let logits = tokens.clone().unsqueeze_dim::<3>(2).repeat_dim(2, 4);
    SequenceOutput::new(loss, logits, Some(tokens.clone().int()), tokens.int())
});

macro_rules! train_output {
    ($group:expr, $model:ident, $metric:expr, $name:expr) => {{
        let (group, artifacts) = ($group, tempfile::tempdir().expect("a folder"));
        let numbers: Vec<f32> = (0..11).map(|item| item as f32 / 2.0).collect();
        let train = DataLoaderBuilder::new(Numbers(numbers.clone()), group).batch_size(4).build(Items(11))?;
        let valid = DataLoaderBuilder::new(Numbers(numbers), group).batch_size(4).build(Items(11))?;
        let training = SupervisedTraining::new(artifacts.path(), train, valid)
            .metrics((LossMetric::<Flex>::new(),))
            .metric_valid_numeric($metric)
            .renderer(PlainRenderer::to(std::io::sink()))
            .with_application_logger(None);
        let model = $model::<B> { w: Param::from_tensor(Tensor::ones([1], group.device())) };
        let learner = Learner::new(model, SgdConfig::new().init(), ConstantLr::new(0.01));
        training.launch_ddp(&DdpStrategy::new(group), learner)?;
        if group.rank().is_root() {
            let mut all = values(artifacts.path(), "train", 1, "Loss");
            all.extend(values(artifacts.path(), "valid", 1, $name));
            tell(&all)
        } else {
            String::new()
        }
    }};
}

fn outputs() -> Result<String> {
    let group = &ProcessGroup::<G>::from_env(&Default::default())?;
    let all = [
        train_output!(group, Scale, LossMetric::<Flex>::new(), "Loss"),
        train_output!(group, Labeller, HammingScore::<Flex>::new(), "Hamming_Score_@_Threshold(0.5)"),
        train_output!(group, Speaker, AccuracyMetric::<Flex>::new(), "Accuracy"),
    ];
    Ok(all.join("\n"))
}

#[test]
fn all_of_burns_outputs_are_joined() {
    let one = Launch::new("outputs", 1).succeed().remove(0);
    for world in [2, 3] {
        let text = Launch::new("outputs", world).succeed().remove(0);
        for ((got, wanted), what) in text.lines().zip(one.lines()).zip(["regression", "labels", "sequence"]) {
            close(&format!("world {world}, {what}"), &read(got), &read(wanted), 1e-5);
        }
    }
}

/// Trains with a limit below the size of a batch's scores, with or without a metric that needs them.
fn limited() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let artifacts = tempfile::tempdir().expect("a folder");
    let (train, valid) = loaders(&group, 10, 5, 0)?;
    let mut training = SupervisedTraining::new(artifacts.path(), train, valid)
        .metrics((LossMetric::<Flex>::new(),))
        .renderer(PlainRenderer::to(std::io::sink()))
        .with_application_logger(None);
    if argument() == "accuracy" {
        training = training.metrics((AccuracyMetric::<Flex>::new(),));
    }
    let ddp = DdpStrategy::new(&group).with_output_limit(20);
    training.launch_ddp(&ddp, learner(&group, &NetConfig::new())?)?;
    if !group.rank().is_root() {
        return Ok(String::new());
    }
    Ok(tell(&values(artifacts.path(), "train", 1, "Loss")))
}

#[test]
fn above_the_output_limit_the_loss_is_global_and_other_metrics_are_refused_by_name() {
    for outcome in Launch::new("limited", 2).argument("accuracy").run() {
        outcome.failed_saying(&["Accuracy", "20", "with_output_limit", "epoch 1, iteration 1"]);
    }
    let one = Launch::new("limited", 1).succeed().remove(0);
    let two = Launch::new("limited", 2).succeed().remove(0);
    close("loss", &read(&two), &read(&one), 1e-5);
}

/// The parameters after a training with dropout on equal items.
fn dropout() -> Result<String> {
    let group = ProcessGroup::<G>::from_env(&Default::default())?;
    let device = group.device();
    let artifacts = tempfile::tempdir().expect("a folder");
    let (train, valid) = loaders(&group, 10, 5, 0)?;
    let training = training(artifacts.path(), train, valid);
    let learner = learner(&group, &NetConfig::new().with_dropout(0.5))?;
    B::seed(device, 7);
    let seed = argument().parse().expect("a seed");
    let result = training.launch_ddp(&DdpStrategy::new(&group).with_seed(seed), learner)?;
    // The numbers drawn after the training show that the streams differ.
    let drawn = Tensor::<G, 1>::random([4], burn::tensor::Distribution::Default, device).into_data();
    Ok(format!("{} {}", tell(&numbers(&result.model)), tell(&drawn.iter::<f64>().collect::<Vec<_>>())))
}

#[test]
fn random_streams_differ_by_rank_and_repeat() {
    let drawn = |text: &String| read(text)[read(text).len() - 4..].to_vec();
    let first = Launch::new("dropout", 2).argument(1).succeed();
    assert_ne!(drawn(&first[0]), drawn(&first[1]));
    assert_eq!(first, Launch::new("dropout", 2).argument(1).succeed());
    let other = Launch::new("dropout", 2).argument(2).succeed();
    assert_ne!(drawn(&first[1]), drawn(&other[1]));
    assert_eq!(drawn(&first[0]), drawn(&other[0]), "rank 0 keeps the program's stream");
}
