//! Conflicts between ranks that the start of a group finds before NCCL does.

use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use burn_ddp::{CommunicatorKind, Error, RankInfo, ReduceOp, Result};
use burn_ddp_nccl::library::Version;

use super::host::{B, VERSION, events, over_fake, over_fake_of_kind};
use crate::fake::{self, Script, Step};
use crate::harness::{Case, Launch, Outcome, argument};

pub const CASES: &[(&str, Case)] = &[("startup", startup)];

/// Starts a group, as the argument says, and adds up in it.
fn startup() -> Result<String> {
    let rank = RankInfo::from_env()?.rank.0;
    let odd = rank == 1;
    let nccl = (fake::symbols(), VERSION);
    let none = || Err(Error::config("libnccl.so.2 is not there"));
    let start = Instant::now();
    let group = match argument().as_str() {
        "one device" => over_fake(0, Ok(nccl)),
        "one without" => over_fake(rank as u8, if odd { none() } else { Ok(nccl) }),
        "old" if odd => over_fake(1, Ok((nccl.0, Version { minor: 26, ..VERSION }))),
        "stuck" => {
            fake::play(Script { init: Step::Never, ..Script::default() });
            over_fake(rank as u8, Ok(nccl))
        }
        "dies" => {
            let init = if odd { Step::Exits } else { Step::Never };
            fake::play(Script { init, ..Script::default() });
            over_fake(rank as u8, Ok(nccl))
        }
        // The harness gives all ranks one environment, so a rank sets another kind by itself.
        "kinds" if odd => over_fake_of_kind(CommunicatorKind::Host, 1, Ok(nccl)),
        _ => over_fake(rank as u8, Ok(nccl)),
    };
    if argument() == "dies" {
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }
    let group = group?;
    let sum = group.all_reduce(Tensor::<B, 1>::ones([3], group.device()), ReduceOp::Sum).wait()?;
    assert_eq!(sum.into_data().to_vec::<f32>().expect("floats"), [group.world_size() as f32; 3]);
    let by_nccl = events().contains(&"all_reduce");
    Ok(if by_nccl { "nccl" } else { "host" }.into())
}

fn launch(argument: &str, world_size: usize, kind: &str) -> Launch {
    Launch::new("startup", world_size).argument(argument).env("BURN_DDP_COMM", kind)
}

fn refused(outcomes: &[Outcome], code: i32, words: &[&str]) {
    for outcome in outcomes {
        outcome.failed_saying(words);
        assert_eq!((outcome.status.code(), outcome.stderr.lines().count()), (Some(code), 1), "{outcome:?}");
    }
}

#[test]
fn two_ranks_on_one_device_are_refused_before_nccl_unless_they_share_it_through_the_host() {
    let words = ["rank 0 and rank 1 drive one device", "a fake", "BURN_DDP_COMM=host"];
    for kind in ["auto", "nccl"] {
        refused(&launch("one device", 3, kind).run(), 2, &words);
    }
    assert_eq!(launch("one device", 2, "host").succeed(), ["host", "host"]);
}

#[test]
fn without_nccl_on_one_rank_all_go_through_the_host_or_say_why_not() {
    assert_eq!(launch("", 3, "auto").succeed(), ["nccl"; 3]);
    assert_eq!(launch("one without", 3, "auto").succeed(), ["host"; 3]);
    let words = ["BURN_DDP_COMM=nccl", "rank 1 on", "libnccl.so.2 is not there"];
    refused(&launch("one without", 3, "nccl").run(), 2, &words);
    assert_eq!(launch("old", 2, "auto").succeed(), ["host"; 2]);
    refused(&launch("old", 2, "nccl").run(), 2, &["2.27.5 on rank 0", "2.26.5 on rank 1"]);
}

#[test]
fn different_wishes_are_refused() {
    refused(
        &launch("kinds", 2, "auto").run(),
        1,
        &["BURN_DDP_COMM differs", "rank 0 has Auto", "rank 1 has Host"],
    );
}

#[test]
fn a_start_that_never_ends_obeys_the_limit_and_names_the_phase() {
    let outcomes = launch("stuck", 2, "auto").env("BURN_DDP_RENDEZVOUS_TIMEOUT", 2).run();
    refused(&outcomes, 1, &["connect on rank", "2s"]);
}

#[test]
fn a_rank_that_dies_while_it_connects_is_named() {
    let outcomes = launch("dies", 3, "auto").run();
    refused(&[&outcomes[..1], &outcomes[2..]].concat(), 1, &["connect on rank", "rank 1"]);
}

#[test]
fn a_world_of_one_has_no_communicator_unless_it_asks_for_one() {
    assert_eq!(launch("", 1, "auto").succeed(), ["host"]);
    assert_eq!(launch("", 1, "nccl").env("BURN_DDP_CONNECT_ALONE", 1).succeed(), ["nccl"]);
}
