//! The states of a window, one event at a time, in a connected group of one rank.

use burn::tensor::TensorData;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn_ddp_comm::{DType, GroupOptions, RankInfo};
use burn_flex::Flex;

use super::*;
use crate::bucket::ParamRole;
use crate::communicator::{AnyTensor, into_data};

fn group() -> ProcessGroup<Flex> {
    let mut options = GroupOptions::new();
    options.connect_alone = true;
    ProcessGroup::new(RankInfo::solo(), options, &Default::default()).expect("a group of one")
}

/// A reducer of three parameters of 1, 2 and 3 elements, each of which is a bucket; the first is in the last bucket.
fn reducer(group: &ProcessGroup<Flex>) -> Reducer<Flex> {
    let spec = |elements: usize| ParamSpec {
        path: format!("p{elements}"),
        shape: vec![elements],
        dtype: DType::F32,
        role: ParamRole::Trained,
    };
    let options = ReducerOptions {
        reduction: GradientReduction::Sum,
        order: Order::AsTheyCome,
        bucket_bytes: Some(1),
        buckets_in_flight: 10,
        accumulation: Some(1),
        overlap: true,
    };
    Reducer::new(group.clone(), [1, 2, 3].map(spec).to_vec(), options)
}

/// The gradient of parameter `index`.
fn gradient(index: usize) -> FloatTensor<Flex> {
    Flex::float_from_data(
        TensorData::new(vec![index as f32 + 0.5; index + 1], [index + 1]),
        &Default::default(),
    )
}

/// True if `reducer` takes the gradient of parameter `index` when it is ready.
fn takes(reducer: &mut Reducer<Flex>, index: usize) -> bool {
    let mut ready = gradient(index);
    reducer.gradient_ready(index, &mut ready);
    let left = ready.shape().num_elements();
    assert!(left == 0 || left == index + 1);
    left == 0
}

#[test]
fn buckets_are_sent_in_the_plans_order_and_the_last_one_by_reduce() {
    let group = group();
    let mut reducer = reducer(&group);
    for step in 1..=3 {
        reducer.backward_begins(true);
        assert!(takes(&mut reducer, 1));
        assert_eq!(reducer.stats().in_backward, 2 * (step - 1), "the first bucket is parameter 2");
        assert!(takes(&mut reducer, 2) && !takes(&mut reducer, 0) && !takes(&mut reducer, 1));
        assert_eq!([0, 1, 2].map(|index| reducer.has_taken(index)), [false, true, true]);
        reducer.add(vec![(0, gradient(0))], None, None).expect("added");
        let reduction = reducer.reduce().expect("reduced");
        for (index, reduced) in reduction.gradients.into_iter().enumerate() {
            let read = |tensor| into_data::<Flex>(AnyTensor::Float(tensor)).expect("data");
            assert_eq!(read(reduced.expect("used")), read(gradient(index)));
        }
        let sent = OverlapStats { steps: step, in_backward: 2 * step, after_backward: step };
        assert_eq!(reducer.stats(), sent);
    }
}

#[test]
fn nothing_is_taken_where_the_pass_is_not_known_to_be_the_windows_last() {
    let group = group();
    let mut reducer = reducer(&group);
    assert!(!takes(&mut reducer, 2), "no pass has begun");
    reducer.backward_begins(false);
    assert!(!takes(&mut reducer, 2), "the pass reaches another replica");
    reducer.backward_begins(true);
    reducer.add(Vec::new(), None, None).expect("added");
    assert!(!takes(&mut reducer, 2), "its micro-step was added");
    reducer.backward_begins(true);
    assert!(!takes(&mut reducer, 2), "the window is longer than expected");
    reducer.discard();
    reducer.backward_begins(true);
    assert!(takes(&mut reducer, 1));
    reducer.backward_begins(true);
    assert!(!takes(&mut reducer, 2) && reducer.has_taken(1), "a second pass before the micro-step was added");
}

#[test]
fn the_lease_is_held_from_the_first_gradient_until_the_micro_step_is_added() {
    let group = group();
    let (mut first, mut second) = (reducer(&group), reducer(&group));
    first.backward_begins(true);
    second.backward_begins(true);
    assert!(takes(&mut first, 1) && !takes(&mut second, 1));
    first.continue_window().expect("nothing was sent");
    first.add(Vec::new(), None, None).expect("added");
    assert!(takes(&mut second, 1) && takes(&mut second, 2));
    let error = second.continue_window().expect_err("sent").to_string();
    assert!(error.contains("no_sync after 2 gradient buckets") && error.contains("micro-step 1"), "{error}");
    let error = second.add(Vec::new(), None, Some(0.0)).expect_err("another weight").to_string();
    assert!(error.contains("expect_weight(0)"), "{error}");
}

#[test]
fn an_error_that_could_not_be_returned_comes_out_of_the_next_call() {
    let group = group();
    let mut reducer = reducer(&group);
    reducer.backward_begins(true);
    assert!(reducer.replica_dropped().is_none() && takes(&mut reducer, 2));
    let error = reducer.replica_dropped().expect("sent").to_string();
    assert!(error.contains("dropped after 1 of its gradient buckets"), "{error}");
    reducer.discard();
    reducer.hook_failed(Error::config("a later error"));
    reducer.backward_begins(true);
    assert!(!takes(&mut reducer, 1));
    let refused = group.ranks().acquire_backward_lease();
    assert!(refused.is_none(), "ranks may be out of step");
    let error = reducer.take_error().expect_err("discarded").to_string();
    assert!(error.contains("discarded after 1 of its gradient buckets"), "{error}");
    reducer.take_error().expect("returned once");
    assert!(group.ranks().acquire_backward_lease().is_some());
}
