//! Fashion-MNIST: 28 x 28 grey images of ten kinds of clothes.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_ddp::{Error, Result};

use crate::idx;

/// Height and width of an image.
pub(crate) const SIDE: usize = 28;
const PIXELS: usize = SIDE * SIDE;
pub(crate) const CLASSES: usize = 10;

/// Mean and standard deviation of the pixels of the training images, where white is 1.
const MEAN: f32 = 0.2860;
const DEVIATION: f32 = 0.3530;

/// Training items for each test item; `--limit` keeps this ratio.
const TRAIN_PER_TEST: usize = 6;

/// One image as bytes; the batcher converts it to numbers.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    /// Its index in the file.
    pub(crate) id: usize,
    image: [u8; PIXELS],
    label: u8,
}

/// A split, held in memory once for all its loaders.
#[derive(Clone)]
pub(crate) struct Images(Arc<Split>);

struct Split {
    images: Vec<u8>,
    labels: Vec<u8>,
}

impl Dataset<Item> for Images {
    fn get(&self, id: usize) -> Option<Item> {
        let label = *self.0.labels.get(id)?;
        let image = self.0.images[id * PIXELS..][..PIXELS].try_into().ok()?;
        Some(Item { id, image, label })
    }

    fn len(&self) -> usize {
        self.0.labels.len()
    }
}

#[cfg(test)]
impl Images {
    /// `count` images of all classes in turn, of the brightness of their class.
    pub(crate) fn plain(count: usize) -> Self {
        let labels: Vec<u8> = (0..count).map(|item| (item % CLASSES) as u8).collect();
        let images = labels.iter().flat_map(|label| [label * 20; PIXELS]).collect();
        Self(Arc::new(Split { images, labels }))
    }
}

/// Both splits: the first `limit` training items, and a sixth of that, rounded up, of the test items, since the data
/// set has six training items for each test item.
pub(crate) fn read(directory: &Path, limit: Option<usize>) -> Result<(Images, Images)> {
    for name in ["train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"] {
        let name = format!("{name}-ubyte.gz");
        if !directory.join(&name).exists() {
            return Err(Error::config(format!(
                "no {name} in {}: install Debian's package dataset-fashion-mnist, or name the directory that holds \
                 the four files of Fashion-MNIST with --data",
                directory.display()
            )));
        }
    }
    let train = split(directory, "train", limit)?;
    let test = split(directory, "t10k", limit.map(|limit| limit.div_ceil(TRAIN_PER_TEST)))?;
    Ok((train, test))
}

fn split(directory: &Path, name: &str, limit: Option<usize>) -> Result<Images> {
    let path = |kind: &str| directory.join(format!("{name}-{kind}-ubyte.gz"));
    let side = SIDE as u32;
    let (count, mut images) = idx::read::<3>(&path("images-idx3"), &[side, side])?;
    let (labelled, mut labels) = idx::read::<1>(&path("labels-idx1"), &[])?;
    let wrong = |what: String| Err(Error::config(format!("{}: {what}", path("labels-idx1").display())));
    if labelled != count || count == 0 {
        return wrong(format!(
            "expected as many labels as there are images, at least one: {labelled}, {count}"
        ));
    }
    if let Some(item) = labels.iter().position(|label| usize::from(*label) >= CLASSES) {
        return wrong(format!("expected labels from 0 to {}, found {} at {item}", CLASSES - 1, labels[item]));
    }
    if let Some(limit) = limit.filter(|limit| *limit < count) {
        labels.truncate(limit);
        images.truncate(limit * PIXELS);
    }
    Ok(Images(Arc::new(Split { images, labels })))
}

/// A micro-batch, or a rank's share of one.
#[derive(Clone, Debug)]
pub(crate) struct Batch<B: Backend> {
    pub(crate) images: Tensor<B, 3>,
    pub(crate) labels: Tensor<B, 1, Int>,
    ids: Vec<usize>,
    log: Option<BatchLog>,
}

impl<B: Backend> Batch<B> {
    /// Logs the items as trained on.
    pub(crate) fn log(&self) {
        if let Some(log) = &self.log {
            log.add(&self.ids);
        }
    }
}

/// Normalizes images.
#[derive(Clone, Default)]
pub(crate) struct ImageBatcher {
    pub(crate) log: Option<BatchLog>,
}

impl<B: Backend> Batcher<B, Item, Batch<B>> for ImageBatcher {
    fn batch(&self, items: Vec<Item>, device: &B::Device) -> Batch<B> {
        let normal = |byte: &u8| (f32::from(*byte) / 255.0 - MEAN) / DEVIATION;
        let pixels: Vec<f32> = items.iter().flat_map(|item| &item.image).map(normal).collect();
        let labels: Vec<i32> = items.iter().map(|item| i32::from(item.label)).collect();
        let count = items.len();
        Batch {
            images: Tensor::from_data(TensorData::new(pixels, [count, SIDE, SIDE]), device),
            labels: Tensor::from_data(TensorData::new(labels, [count]), device),
            ids: items.into_iter().map(|item| item.id).collect(),
            log: self.log.clone(),
        }
    }
}

/// The ids of this rank's items, one line for each micro-step, in the order of the training steps. Batchers run ahead
/// on threads of their own, so the training step logs its batch.
#[derive(Clone, Debug, Default)]
pub(crate) struct BatchLog(Arc<Mutex<String>>);

impl BatchLog {
    fn add(&self, ids: &[usize]) {
        let words: Vec<_> = ids.iter().map(usize::to_string).collect();
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.push_str(&words.join(" "));
        lines.push('\n');
    }

    /// Writes `file.rankN`.
    pub(crate) fn write(&self, file: &Path, rank: usize) -> Result<()> {
        let mut path = file.as_os_str().to_owned();
        path.push(format!(".rank{rank}"));
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::fs::write(&path, lines.as_bytes())
            .map_err(|error| Error::io(format!("--log-batches {}", Path::new(&path).display()), error))
    }
}
