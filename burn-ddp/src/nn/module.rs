//! [`SyncBatchNorm`] as a module: Burn's `BatchNorm` in all respects, with a group that stays.
//!
//! Written out because the derive would give the layer a record of its own, with one entry more than Burn's, and
//! a path of its own for every parameter.

use std::fmt;
use std::ops::Deref;

use burn::module::{
    AutodiffModule, Content, Devices, DisplaySettings, HasAutodiffModule, Module, ModuleDisplay,
    ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
};
use burn::nn::BatchNorm;
use burn::tensor::backend::{AutodiffBackend, Backend};

use super::SyncBatchNorm;

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
        let ranks = self.group.as_ref().map_or(1, super::SyncGroup::world_size);
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
