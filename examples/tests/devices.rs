//! The training loop of `gpt` on a device that is not the default one, which takes a backend with two of them. In a file
//! of its own because only one test of a process may train.

#[path = "../src/bin/gpt/main.rs"]
#[allow(dead_code)]
mod gpt;

use burn_ddp::{Ddp, ProcessGroup};
use burn_dispatch::{Dispatch, DispatchDevice};
use clap::Parser;

#[test]
fn everything_is_on_the_device_of_the_rank() {
    // The default is Flex; a tensor of one cannot be combined with one of the other.
    let device = DispatchDevice::NdArray(Default::default());
    assert_ne!(device, DispatchDevice::default());
    let flags =
        "--layers 1 --heads 2 --embd 16 --batch-size 2 --seq-len 16 --total-batch-tokens 64 --steps 2";
    let args = gpt::args::Args::parse_from(format!("gpt {flags} --eval-every 2").split(' '));
    let mut plan = gpt::plan::Plan::new(&args, 1).unwrap();
    // A few windows: the loss of a tenth of the text takes long in a build without optimization.
    plan.text.held_out.truncate(100);
    let group = ProcessGroup::<Ddp<Dispatch>>::solo(&device);
    gpt::train::train(&group, &args, &plan).unwrap();
}
