//! Tests of loaders as users build them; the ranks of most tests are several loaders in one thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::Dataset;
use burn_ddp_comm::error::panic_text;
use burn_ddp_comm::store::MemoryStore;
use burn_ddp_comm::{GroupOptions, Rank, RankInfo};
use burn_flex::{Flex, FlexDevice};

use super::*;

type B = crate::Ddp<Flex>;
type Loader = Arc<dyn DataLoader<B, Vec<usize>>>;

/// The numbers below `len`; `get` returns `None` for the missing one and panics for the bad one.
struct Numbers {
    len: usize,
    missing: Option<usize>,
    bad: Option<usize>,
}

impl Numbers {
    fn below(len: usize) -> Self {
        Self { len, missing: None, bad: None }
    }
}

impl Dataset<usize> for Numbers {
    fn get(&self, index: usize) -> Option<usize> {
        assert!(self.bad != Some(index), "bad row {index}");
        (index < self.len && self.missing != Some(index)).then_some(index)
    }

    fn len(&self) -> usize {
        self.len
    }
}

struct Collect;

impl Batcher<B, usize, Vec<usize>> for Collect {
    fn batch(&self, items: Vec<usize>, _: &FlexDevice) -> Vec<usize> {
        items
    }
}

fn builder(rank: usize, world: usize) -> DataLoaderBuilder<B, usize, Vec<usize>> {
    DataLoaderBuilder::at(Collect, (rank, world), FlexDevice, Arc::default())
}

fn batches(loader: &Loader) -> Vec<Vec<usize>> {
    loader.iter().collect()
}

#[test]
fn any_number_of_workers_makes_the_same_batches() {
    for rank in 0..2 {
        let of = |workers: usize| {
            let loader = builder(rank, 2).batch_size(4).shuffle(3).num_workers(workers);
            let loader = loader.build(Numbers::below(50)).expect("a loader");
            [batches(&loader), batches(&loader)]
        };
        let without = of(0);
        assert_eq!(without.each_ref().map(Vec::len), [13, 13]);
        assert_ne!(without[0], without[1]);
        for workers in [1, 3, 40] {
            assert_eq!(of(workers), without, "{workers} workers");
        }
    }
}

#[test]
fn the_epoch_goes_on_by_itself_and_can_be_set() {
    let shards = Arc::<Shards>::default();
    let loader = DataLoaderBuilder::<B, _, _>::at(Collect, (0, 1), FlexDevice, shards.clone());
    let loader = loader.batch_size(16).shuffle(1).build(Numbers::below(16)).expect("a loader");
    let epochs = [batches(&loader), batches(&loader), batches(&loader)];
    assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2] && epochs[0] != epochs[2]);
    let state = shards.find(&loader).expect("a sharded loader");
    state.set_epoch(1);
    let moved = loader.to_device(&FlexDevice);
    assert_eq!([batches(&moved), batches(&loader)], [epochs[1].clone(), epochs[2].clone()]);
    assert!(shards.find(&moved).is_some_and(|known| Arc::ptr_eq(&known, &state)));
    let resumed = builder(0, 1).batch_size(16).shuffle(1).first_epoch(2).build(Numbers::below(16));
    assert_eq!(batches(&resumed.expect("a loader")), epochs[2]);
}

#[test]
fn progress_counts_this_ranks_items() {
    let loader = builder(1, 2).batch_size(5).num_workers(2).build(Numbers::below(11)).expect("a loader");
    let mut iterator = loader.iter();
    let mut seen = Vec::new();
    while let Some(batch) = iterator.next() {
        let progress = iterator.progress();
        seen.push((batch.len(), progress.items_processed, progress.items_total));
    }
    assert_eq!(seen, [(2, 2, 4), (2, 4, 4)]);
    assert_eq!(loader.num_items(), 4);
}

#[test]
fn placeholders_give_all_ranks_the_same_number_of_batches() {
    for (rank, counts) in [(0, [1, 1, 1]), (1, [1, 1, 0]), (2, [0, 0, 0])] {
        let shards = Arc::<Shards>::default();
        let loader = DataLoaderBuilder::<B, _, _>::at(Collect, (rank, 3), FlexDevice, shards.clone());
        let loader = loader.batch_size(2).build(Numbers::below(5)).expect("a loader");
        shards.find(&loader).expect("known").set_placeholders(true);
        let mut iterator = loader.iter();
        for count in counts {
            let before = iterator.progress().items_processed;
            assert_eq!(iterator.next().map(|batch| batch.len()), Some(1));
            assert_eq!(iterator.progress().items_processed - before, count, "rank {rank}");
        }
        assert_eq!(iterator.next(), None);
    }
}

#[test]
fn slices_are_disjoint_in_every_epoch() {
    let loader = builder(0, 2).batch_size(4).shuffle(5).build(Numbers::below(21)).expect("a loader");
    let (front, back) = (loader.slice(0, 4), loader.slice(4, 11));
    for _ in 0..3 {
        let parts = [batches(&front).concat(), batches(&back).concat()].concat();
        assert_eq!(parts, batches(&loader).concat());
    }
}

/// Number of batches of a loader before it panics, and the message.
fn until_panic(loader: &Loader) -> (usize, String) {
    let mut iterator = loader.iter();
    let mut count = 0;
    loop {
        match catch_unwind(AssertUnwindSafe(|| iterator.next())) {
            Ok(Some(_)) => count += 1,
            Ok(None) => return (count, "no panic".into()),
            Err(payload) => {
                assert_eq!(iterator.next(), None, "nothing follows a panic");
                return (count, panic_text(&*payload).into());
            }
        }
    }
}

#[test]
fn what_the_data_set_does_wrong_comes_out_where_the_batch_is_asked_for() {
    for workers in [0, 1, 3] {
        let of = |numbers: Numbers| {
            let loader = builder(0, 1).batch_size(5).num_workers(workers).build(numbers);
            until_panic(&loader.expect("a loader"))
        };
        let (count, text) = of(Numbers { bad: Some(13), ..Numbers::below(21) });
        assert_eq!((count, text.as_str()), (2, "bad row 13 (in Dataset::get of item 13 of 21)"));
        let (count, text) = of(Numbers { missing: Some(13), ..Numbers::below(21) });
        assert_eq!((count, text.as_str()), (2, "Dataset::get returned None for item 13 of 21"));
    }
}

#[test]
fn a_panic_in_the_batcher_names_the_batch() {
    struct Picky;
    impl Batcher<B, usize, Vec<usize>> for Picky {
        fn batch(&self, items: Vec<usize>, _: &FlexDevice) -> Vec<usize> {
            assert!(!items.contains(&4), "no fours");
            items
        }
    }
    for workers in [0, 2] {
        let loader = DataLoaderBuilder::<B, _, _>::at(Picky, (0, 1), FlexDevice, Arc::default());
        let loader = loader.batch_size(2).num_workers(workers).build(Numbers::below(9)).expect("a loader");
        assert_eq!(until_panic(&loader), (2, "no fours (in Batcher::batch of batch 2, items 4, 5)".into()));
    }
}

#[test]
fn an_iterator_dropped_midway_ends_its_workers() {
    struct Counted(Arc<AtomicUsize>);
    impl Dataset<usize> for Counted {
        fn get(&self, index: usize) -> Option<usize> {
            self.0.fetch_add(1, Ordering::SeqCst);
            Some(index)
        }
        fn len(&self) -> usize {
            1_000_000
        }
    }
    let made = Arc::new(AtomicUsize::new(0));
    let loader = builder(0, 1).batch_size(1).num_workers(3).build(Counted(made.clone())).expect("a loader");
    let mut iterator = loader.iter();
    assert_eq!(iterator.next(), Some(vec![0]));
    drop(iterator);
    let stopped = made.load(Ordering::SeqCst);
    assert!(stopped < 20, "{stopped} were made ahead");
    // Only the loader itself holds the data set now: no thread is left.
    assert_eq!(Arc::strong_count(&made), 2);
    drop(loader);
    assert_eq!((Arc::strong_count(&made), made.load(Ordering::SeqCst)), (1, stopped));
}

#[test]
fn options_that_make_no_sense_are_refused_by_name() {
    let say = |builder: DataLoaderBuilder<B, usize, Vec<usize>>, items: usize| match builder
        .build(Numbers::below(items))
    {
        Ok(_) => "built".into(),
        Err(error) => error.to_string(),
    };
    let two = || builder(0, 2).batch_size(2);
    let table = [
        (builder(0, 2), 9, "no batch size"),
        (two().batch_size(0), 9, "batch_size is 0"),
        (two().accumulation(0), 9, "accumulation is 0"),
        (two().pad().drop_last(), 9, "drop_last and pad"),
        (two(), 0, "no items"),
        (two().accumulation(5).drop_last(), 9, "a window is 10"),
        (two().accumulation(5).pad(), 9, "built"),
        (two().batch_size(1), 9, "built"),
    ];
    for (builder, items, word) in table {
        let text = say(builder, items);
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

/// Runs `body` on three ranks, each with its own group over one store.
fn on_three_ranks<T: Send + 'static>(body: fn(ProcessGroup<B>) -> Result<T>) -> Vec<Result<T>> {
    let store = Arc::new(MemoryStore::default());
    let rank = |rank: usize| {
        let store = store.clone();
        std::thread::spawn(move || {
            let info = RankInfo { rank: Rank(rank), world_size: 3, ..RankInfo::solo() };
            let options = GroupOptions::new().with_timeout(std::time::Duration::from_secs(20));
            ProcessGroup::over_store(info, options, &FlexDevice, store, [127, 0, 0, 1].into()).and_then(body)
        })
    };
    let threads: Vec<_> = (0..3).map(rank).collect();
    threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
}

#[test]
fn placeholders_keep_all_ranks_busy_and_count_nothing() {
    let ranks = on_three_ranks(|group| {
        let loader: Loader =
            DataLoaderBuilder::new(Collect, &group).batch_size(2).build(Numbers::below(5))?;
        let state = sharded(&loader, &group, "training")?;
        state.inspect(|state| state.set_placeholders(true));
        let mut lockstep = Lockstep::new(loader.iter(), &group, Uneven::Join);
        let mut rounds = Vec::new();
        while let Some(round) = lockstep.next(false)? {
            rounds.push((round.batch.map(|batch| batch.len()), round.items, round.items_all, round.last));
        }
        Ok(rounds)
    });
    for (rank, rounds) in ranks.into_iter().enumerate() {
        let mine = |all: usize, last| (Some(1), usize::from(rank < all), all, last);
        assert_eq!(rounds.expect("an epoch"), [mine(2, false), mine(2, false), mine(1, true)]);
    }
}

#[test]
fn ranks_that_disagree_on_uneven_data_are_named() {
    let ranks = on_three_ranks(|group| {
        let loader: Loader =
            DataLoaderBuilder::new(Collect, &group).batch_size(3).build(Numbers::below(9))?;
        let uneven = if group.rank().0 == 2 { Uneven::Truncate } else { Uneven::Join };
        let mut lockstep = Lockstep::new(loader.iter(), &group, uneven);
        lockstep.next(false).map(drop)
    });
    for rank in ranks {
        let text = rank.expect_err("a mismatch").to_string();
        assert!(text.contains("rank 0 has Join, rank 2 has Truncate"), "{text}");
    }
}

#[test]
fn accumulation_decides_what_is_dropped_or_filled() {
    for rank in 0..2 {
        let build = || builder(rank, 2).batch_size(4).accumulation(2).shuffle(9);
        let of = |builder: DataLoaderBuilder<B, usize, Vec<usize>>| {
            let loader = builder.build(Numbers::below(21)).expect("a loader");
            let sizes: Vec<_> = batches(&loader).iter().map(Vec::len).collect();
            assert_eq!(sizes.iter().sum::<usize>(), loader.num_items());
            sizes
        };
        assert_eq!(of(build().drop_last()), [2; 4]);
        assert_eq!(of(build().pad()), [2; 6]);
        assert_eq!(of(build()).len(), 6 - rank);
    }
}
