//! [`SyncBatchNorm`] as a module: Burn's `BatchNorm` with a group that every copy of the module keeps.
//!
//! The module has the record and the parameter paths of a plain `BatchNorm`, so that their records are interchangeable.
//! For that the traits are implemented by hand; `#[derive(Module)]` would add an entry to the record and a level to the
//! path of every parameter.

use std::fmt;
use std::ops::Deref;

use burn::module::{
    AutodiffModule, Content, Devices, DisplaySettings, HasAutodiffModule, Module, ModuleDisplay,
    ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::nn::BatchNorm;
use burn::tensor::backend::{AutodiffBackend, Backend};

use super::batch_norm::SyncBatchNorm;
use super::group::SyncGroup;

impl<B: Backend> Deref for SyncBatchNorm<B> {
    type Target = BatchNorm<B>;

    fn deref(&self) -> &BatchNorm<B> {
        &self.plain
    }
}

impl<B: Backend> SyncBatchNorm<B> {
    fn change(self, change: impl FnOnce(BatchNorm<B>) -> BatchNorm<B>) -> Self {
        Self { plain: change(self.plain), group: self.group }
    }
}

impl<B: Backend> Module<B> for SyncBatchNorm<B> {
    type Record = <BatchNorm<B> as Module<B>>::Record;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.plain.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        self.change(|plain| plain.fork(device))
    }

    fn to_device(self, device: &B::Device) -> Self {
        self.change(|plain| plain.to_device(device))
    }

    fn num_params(&self) -> usize {
        Module::num_params(&self.plain)
    }

    fn visit<Visitor: ModuleVisitor<B>>(&self, visitor: &mut Visitor) {
        self.plain.visit(visitor);
    }

    fn map<Mapper: ModuleMapper<B>>(self, mapper: &mut Mapper) -> Self {
        self.change(|plain| plain.map(mapper))
    }

    fn load_record(self, record: Self::Record) -> Self {
        self.change(|plain| plain.load_record(record))
    }

    fn into_record(self) -> Self::Record {
        self.plain.into_record()
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for SyncBatchNorm<B> {
    type InnerModule = SyncBatchNorm<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        SyncBatchNorm { plain: self.plain.valid(), group: self.group.clone() }
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        Self { plain: BatchNorm::from_inner(module.plain), group: module.group }
    }
}

impl<B: AutodiffBackend> HasAutodiffModule<B> for SyncBatchNorm<B::InnerBackend> {
    type TrainModule = SyncBatchNorm<B>;
}

impl<B: Backend> ModuleDisplayDefault for SyncBatchNorm<B> {
    fn content(&self, content: Content) -> Option<Content> {
        let [num_features] = self.plain.beta.shape().dims();
        let ranks = self.group.as_ref().map_or(1, SyncGroup::world_size);
        content
            .set_top_level_type("SyncBatchNorm")
            .add("num_features", &num_features)
            .add("momentum", &self.plain.momentum)
            .add("epsilon", &self.plain.epsilon)
            .add("ranks", &ranks)
            .optional()
    }

    fn num_params(&self) -> usize {
        Module::num_params(&self.plain)
    }
}

impl<B: Backend> ModuleDisplay for SyncBatchNorm<B> {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new().with_new_line_after_attribute(false).optional()
    }
}

impl<B: Backend> fmt::Display for SyncBatchNorm<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.format(DisplaySettings::default()))
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Autodiff;
    use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
    use burn::nn::BatchNormConfig;
    use burn::record::{BinFileRecorder, FileRecorder, FullPrecisionSettings, NamedMpkFileRecorder};
    use burn::tensor::{Tensor, TensorData};
    use burn_flex::Flex;

    use super::*;
    use crate::nn::{SyncBatchNormConfig, SyncState};
    use crate::{Ddp, ProcessGroup};

    type I = Ddp<Flex>;
    type B = Autodiff<I>;

    /// The same model with either layer.
    #[derive(Module, Debug)]
    struct Synced<B: Backend> {
        norm: SyncBatchNorm<B>,
    }

    #[derive(Module, Debug)]
    struct Plain<B: Backend> {
        norm: BatchNorm<B>,
    }

    fn group() -> (ProcessGroup<I>, SyncGroup) {
        let group = ProcessGroup::solo(&Default::default());
        let sync = SyncGroup::new(&group);
        (group, sync)
    }

    fn synced(sync: &SyncGroup) -> Synced<B> {
        let norm = SyncBatchNormConfig::new(2).init(&Default::default(), Some(sync));
        Synced { norm: norm.expect("a backend of the group") }
    }

    fn x() -> Tensor<B, 3> {
        let values = (0..12).map(|i| (i * 7 % 5) as f32).collect();
        Tensor::from_data(TensorData::new(values, [3, 2, 2]), &Default::default())
    }

    fn state<B: Backend>(norm: &BatchNorm<B>) -> [TensorData; 4] {
        let running = |state: &burn::module::RunningState<Tensor<B, 1>>| state.value_sync().into_data();
        let [mean, var] = [running(&norm.running_mean), running(&norm.running_var)];
        [norm.gamma.val().into_data(), norm.beta.val().into_data(), mean, var]
    }

    fn records_are_exchangeable<R: FileRecorder<B>>(recorder: &R) {
        let (_, sync) = group();
        let device = Default::default();
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str| folder.path().join(name);

        let from = synced(&sync);
        from.norm.forward(x());
        let expected = state(&from.norm);
        from.clone().save_file(file("synced"), recorder).expect("a record");
        let to = Plain { norm: BatchNormConfig::new(2).init::<B>(&device) };
        let to = to.load_file(file("synced"), recorder, &device).expect("Burn's layer reads ours");
        assert_eq!(state(&to.norm), expected);
        assert_eq!(to.norm.gamma.id, from.norm.gamma.id);

        to.norm.forward(x());
        let expected = state(&to.norm);
        to.save_file(file("plain"), recorder).expect("a record");
        let back = synced(&sync).load_file(file("plain"), recorder, &device).expect("ours reads Burn's");
        assert_eq!(state(&back.norm), expected);
        assert!(back.norm.group().is_some(), "a record takes the group away");
    }

    #[test]
    fn a_record_of_either_layer_loads_into_the_other() {
        records_are_exchangeable(&NamedMpkFileRecorder::<FullPrecisionSettings>::new());
        records_are_exchangeable(&BinFileRecorder::<FullPrecisionSettings>::new());
    }

    #[test]
    fn the_group_stays_through_all_that_makes_a_new_model() {
        let (_, sync) = group();
        let device = Default::default();
        let model = synced(&sync);
        let plain = Plain { norm: BatchNormConfig::new(2).init::<B>(&device) };
        assert_eq!(Module::num_params(&model), Module::num_params(&plain));
        let has = |model: &Synced<B>| model.norm.group().is_some();
        let valid = model.valid();
        assert!(valid.norm.group().is_some());
        assert!(has(&valid.clone().train::<B>()));
        let balanced = valid.train::<Autodiff<I, BalancedCheckpointing>>();
        assert!(balanced.norm.group().is_some());
        assert!(has(&model.clone()) && has(&model.clone().fork(&device)));
        assert!(has(&model.clone().to_device(&device)));
        let frozen = model.no_grad();
        assert!(has(&frozen) && !frozen.norm.gamma.is_require_grad());
    }

    #[test]
    fn evaluation_is_by_running_statistics() {
        let (_, sync) = group();
        let model = synced(&sync);
        let plain = BatchNormConfig::new(2).init::<B>(&Default::default());
        model.norm.forward(x());
        plain.forward(x());
        let got = model.valid().norm.forward(x().inner());
        assert_eq!(got.into_data(), plain.valid().forward(x().inner()).into_data());
    }

    #[test]
    fn it_shows_itself() {
        let (_, sync) = group();
        let text = synced(&sync).norm.to_string();
        assert_eq!(
            text,
            "SyncBatchNorm {num_features: 2, momentum: 0.1, epsilon: 0.00001, ranks: 1, params: 8}"
        );
        assert!(format!("{sync:?}").contains("world_size: 1"));
    }

    #[test]
    fn the_group_knows_whether_forward_passes_may_communicate() {
        let group = ProcessGroup::<I>::solo(&Default::default());
        assert_eq!(group.ranks().attached::<SyncState>().modules(), 0);
        SyncBatchNormConfig::new(2).init::<B>(&Default::default(), None).expect("a plain layer");
        assert_eq!(group.ranks().attached::<SyncState>().modules(), 0);
        let sync = SyncGroup::new(&group);
        let layer = synced(&sync);
        drop(sync);
        assert!(group.ranks().attached::<SyncState>().modules() > 0);
        drop(layer);
        assert_eq!(group.ranks().attached::<SyncState>().modules(), 0, "it may be a model's that is gone");
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let (_, sync) = group();
        let error = SyncBatchNormConfig::new(0).init::<B>(&Default::default(), Some(&sync));
        assert!(error.is_err_and(|error| error.to_string().contains("0 features")));
        let error = SyncBatchNormConfig::new(2).init::<Autodiff<Flex>>(&Default::default(), Some(&sync));
        let text = error.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(text.contains("Autodiff<") && text.contains("Ddp<"), "{text}");
    }
}
