//! Collectives through a process group, over real sockets between processes.

use burn::tensor::{Int, Tensor, TensorData};
use burn_ddp::{Ddp, ErrorKind, ProcessGroup, Rank, ReduceOp, Result};
use burn_flex::Flex;

use crate::harness::{Case, Launch};

pub const CASES: &[(&str, Case)] = &[
    ("collectives", collectives),
    ("split", split),
    ("split and leave", split_and_leave),
    ("two hundred reductions", many),
    ("leaving early", leaving_early),
    ("peers", peers),
];

type B = Ddp<Flex>;

fn group() -> Result<ProcessGroup<B>> {
    ProcessGroup::from_env(&Default::default())
}

fn ints(values: &[i64]) -> Tensor<B, 1, Int> {
    Tensor::from_data(TensorData::from(values), &Default::default())
}

fn collectives() -> Result<String> {
    let group = group()?;
    let (rank, size) = (group.rank().0, group.world_size());
    let device = group.device();
    let sum: f32 = (0..size).map(|rank| rank as f32).sum();
    let mine = Tensor::<B, 2>::full([2, 3], rank as f32, device);
    let values = |tensor: Tensor<B, 2>| tensor.into_data().to_vec::<f32>().expect("floats");

    assert_eq!(values(group.all_reduce(mine.clone(), ReduceOp::Sum).wait()?), [sum; 6]);
    assert_eq!(values(group.all_reduce(mine.clone(), ReduceOp::Mean).wait()?), [sum / size as f32; 6]);
    assert_eq!(values(group.all_reduce(mine.clone(), ReduceOp::Max).wait()?), [size as f32 - 1.0; 6]);
    assert_eq!(values(group.all_reduce(mine.clone(), ReduceOp::Min).wait()?), [0.0; 6]);
    let last = Rank(size - 1);
    assert_eq!(values(group.broadcast(mine.clone(), last).wait()?), [size as f32 - 1.0; 6]);
    let gathered = group.all_gather(mine.clone()).wait()?;
    assert_eq!(gathered.dims(), [2 * size, 3]);
    let expected: Vec<f32> = (0..size).flat_map(|rank| [rank as f32; 6]).collect();
    assert_eq!(values(gathered), expected);

    let whole: Vec<i64> = (0..7).map(|i| i + rank as i64).collect();
    let piece = group.reduce_scatter(ints(&whole), ReduceOp::Sum).wait()?;
    let piece: Vec<i64> = piece.into_data().iter().collect();
    let offset: i64 = (0..size as i64).sum();
    let all: Vec<i64> = (0..7).map(|i| i * size as i64 + offset).collect();
    assert_eq!(piece, all[burn_ddp_comm::collective::chunk(7, size, rank)]);

    let flags = Tensor::<B, 1>::from_floats([1.0, 0.0], device).greater_elem(0.5);
    let flags = if rank == 0 { flags } else { flags.bool_not() };
    let flags = group.broadcast(flags, Rank(0)).wait()?;
    assert_eq!(flags.into_data().iter::<bool>().collect::<Vec<_>>(), [true, false]);

    let bytes = group.all_gather_bytes(vec![rank as u8; rank])?;
    assert_eq!(bytes, (0..size).map(|rank| vec![rank as u8; rank]).collect::<Vec<_>>());
    let empty = group.all_reduce(Tensor::<B, 1>::empty([0], device), ReduceOp::Sum).wait()?;
    assert_eq!(empty.dims(), [0]);
    // Several at once, waited for in another order.
    let works: Vec<_> = (0..4).map(|i| group.all_reduce(ints(&[i, 1]), ReduceOp::Sum)).collect();
    for (i, work) in works.into_iter().enumerate().rev() {
        let got: Vec<i64> = work.wait()?.into_data().iter().collect();
        assert_eq!(got, [(i * size) as i64, size as i64]);
    }
    group.barrier()?;
    let stats = group.stats();
    Ok(format!("{} {}", stats.calls("all_reduce"), stats.by_name["broadcast"].calls))
}

#[test]
fn collectives_give_what_they_promise() {
    for world_size in [1, 2, 3, 4] {
        for text in Launch::new("collectives", world_size).succeed() {
            assert_eq!(text, "9 2");
        }
    }
}

#[test]
fn a_world_of_one_can_be_connected_to_measure_it() {
    let world = Launch::new("collectives", 1).env("BURN_DDP_CONNECT_ALONE", 1);
    assert_eq!(world.succeed(), ["9 2"]);
}

#[test]
fn a_group_without_nccl_says_so_at_once() {
    for world in [1, 2] {
        for outcome in Launch::new("peers", world).env("BURN_DDP_COMM", "nccl").run() {
            assert_eq!(outcome.status.code(), Some(2), "{outcome:?}");
            outcome.failed_saying(&["BURN_DDP_COMM=nccl", "flex", "BURN_DDP_COMM=host"]);
        }
    }
}

/// Pairs, then reversed order, then groups inside groups, several in flight.
fn split() -> Result<String> {
    let group = group()?;
    let rank = group.rank().0;
    let pair = group.split(Some(rank as u32 / 2), 0)?.expect("a color");
    let reversed = group.split(Some(0), -(rank as i64))?.expect("a color");
    let none = group.split((rank == 0).then_some(9), 0)?;
    assert_eq!((pair.rank().0, pair.world_size()), (rank % 2, 2));
    assert_eq!((reversed.rank().0, reversed.world_size()), (3 - rank, 4));
    assert_eq!(none.map(|group| group.world_size()), (rank == 0).then_some(1));
    let alone = pair.split(Some(rank as u32), 0)?.expect("a color");
    assert_eq!(alone.world_size(), 1);
    let of_pair = pair.all_reduce(ints(&[rank as i64]), ReduceOp::Sum);
    let of_all = group.all_reduce(ints(&[rank as i64]), ReduceOp::Sum);
    let of_reversed = reversed.broadcast(ints(&[rank as i64]), Rank(0));
    let value = |tensor: Tensor<B, 1, Int>| tensor.into_data().iter::<i64>().next().expect("one");
    assert_eq!(value(of_reversed.wait()?), 3);
    assert_eq!(value(of_all.wait()?), 6);
    assert_eq!(value(of_pair.wait()?), (rank as i64 / 2) * 4 + 1);
    drop(group);
    // The others live on without it.
    assert_eq!(value(pair.all_reduce(ints(&[1]), ReduceOp::Sum).wait()?), 2);
    Ok(String::new())
}

/// Rank 0 leaves as soon as it may while the others still work in their subgroup.
fn split_and_leave() -> Result<String> {
    let group = group()?;
    let part = group.split((group.rank().0 > 0).then_some(0), 0)?;
    drop(group);
    let Some(part) = part else { return Ok(String::new()) };
    let sum = part.all_reduce(ints(&[1]), ReduceOp::Sum).wait()?;
    Ok(sum.into_data().iter::<i64>().sum::<i64>().to_string())
}

#[test]
fn a_part_outlives_the_rank_that_serves_the_store() {
    for _ in 0..5 {
        assert_eq!(Launch::new("split and leave", 3).succeed(), ["", "2", "2"]);
    }
}

#[test]
fn a_group_is_divided_and_the_parts_work_at_once() {
    Launch::new("split", 4).succeed();
}

fn many() -> Result<String> {
    let group = group()?;
    for i in 0..200 {
        let length = [1, 7, 1000][i % 3];
        let mine: Vec<f32> = (0..length).map(|j| (j + i + group.rank().0) as f32).collect();
        let mine = Tensor::<B, 1>::from_data(TensorData::from(mine.as_slice()), group.device());
        let got = group.all_reduce(mine, ReduceOp::Sum).wait()?.into_data().to_vec::<f32>().expect("floats");
        let expected: Vec<f32> = (0..length).map(|j| (4 * (j + i) + 6) as f32).collect();
        assert_eq!(got, expected, "reduction {i}");
    }
    Ok(String::new())
}

#[test]
fn any_number_of_reductions_of_any_size_follow_each_other() {
    Launch::new("two hundred reductions", 4).succeed();
}

/// Rank 0 leaves at once, rank 3 stays; nobody may notice. Then a rank that needs a finished one says so.
fn leaving_early() -> Result<String> {
    let group = group()?;
    group.barrier()?;
    match (group.rank().0, group.world_size()) {
        (3, _) => {
            std::thread::sleep(std::time::Duration::from_secs(1));
            assert!(group.cause().is_none(), "{:?}", group.cause());
        }
        (0, 2) => {
            let error = group.all_reduce(ints(&[1]), ReduceOp::Sum).wait().expect_err("rank 1 has left");
            assert_eq!(error.kind(), ErrorKind::PeerFinished(Rank(1)), "{error}");
            return Ok(error.to_string());
        }
        _ => {}
    }
    Ok(String::new())
}

#[test]
fn leaving_early_disturbs_nobody() {
    for outcome in Launch::new("leaving early", 4).run() {
        assert!(outcome.status.success() && outcome.stderr.is_empty(), "{outcome:?}");
    }
}

#[test]
fn a_peer_that_has_finished_is_not_called_lost() {
    let ranks = Launch::new("leaving early", 2).succeed();
    assert!(ranks[0].contains("rank 1 has already finished"), "{ranks:?}");
}

fn peers() -> Result<String> {
    let group = group()?;
    Ok(group.peers().iter().map(|peer| peer.ip().to_string()).collect::<Vec<_>>().join(" "))
}

#[test]
fn rank_zero_is_found_under_any_name_of_this_host() {
    let host = burn_ddp_comm::net::host::host_name();
    for address in ["localhost", "127.0.0.1", "127.0.0.2", "::1", host.as_str()] {
        let resolves =
            std::net::ToSocketAddrs::to_socket_addrs(&(address, 1)).ok().and_then(|mut all| all.next());
        let usable = resolves.is_some_and(|resolved| std::net::TcpListener::bind((resolved.ip(), 0)).is_ok());
        if !usable {
            eprintln!("skipped {address}: this machine cannot listen on it");
            continue;
        }
        Launch::new("peers", 2).env("MASTER_ADDR", address).succeed();
    }
}

#[test]
fn a_rank_advertises_the_address_it_was_told() {
    let launch = Launch::new("peers", 2).env("BURN_DDP_IFACE", "127.0.0.1{rank}");
    assert_eq!(launch.succeed(), ["127.0.0.10 127.0.0.11"; 2]);
    for outcome in Launch::new("peers", 2).env("BURN_DDP_IFACE", "nosuch0").run() {
        outcome.failed_saying(&["nosuch0", "lo"]);
        assert_eq!(outcome.status.code(), Some(2));
    }
}
