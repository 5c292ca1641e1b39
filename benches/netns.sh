#!/usr/bin/env bash
# Hosts of our own: two network namespaces joined by a veth pair (more than two by a bridge), each end capped by a token
# bucket. All_reduce of one rank in each, beside what iperf3 gets through the same link; then communication behind the
# backward pass (the benchmark overlap).
#
#   sudo benches/netns.sh [--hosts 2] [--rate 1gbit] [--only all_reduce,overlap] [--bytes 64MiB] [-- ARGS OF overlap]
#
# In an all_reduce each link is busy in both directions at once, so iperf3 does the same (--bidir, one stream each way,
# between the first two hosts), and the bus bandwidth is compared with the mean of what it received in the two
# directions.
set -euo pipefail
cd "$(dirname "$0")/.."

# A small embedding: its gradient comes last, and what of it is to be sent nothing can hide.
count=2 rate=1gbit only=all_reduce,overlap bytes=64MiB overlap=(--vocabulary 1000 --layers 9)
while [ $# -gt 0 ]; do
  case "$1" in
    --hosts) count=${2:?}; shift 2 ;;
    --rate) rate=${2:?}; shift 2 ;;
    --only) only=${2:?}; shift 2 ;;
    --bytes) bytes=${2:?}; shift 2 ;;
    --) shift; overlap=("$@"); break ;; # for the benchmark overlap
    *) sed -n 's/^#   sudo /usage: /p' "$0" >&2; exit 2 ;;
  esac
done
say() { printf '%s\n' "$*" >&2; }
[ "$(id -u)" = 0 ] || { say "netns.sh makes network namespaces, for which it must be root: run it with sudo"; exit 2; }
for tool in ip tc iperf3; do
  command -v $tool >/dev/null && continue
  say "$tool is missing; trying apt-get install iproute2 iperf3"
  apt-get install -y --no-install-recommends iproute2 iperf3 >/dev/null 2>&1 ||
    { apt-get update && apt-get install -y --no-install-recommends iproute2 iperf3; } >/dev/null 2>&1 ||
    { say "install $tool first (Debian: iproute2 iperf3)"; exit 2; }
done

out=$PWD/target/netns
rm -rf "$out"
mkdir -p "$out"
executable() { # benchmark, arguments for cargo
  local name=$1; shift
  cargo bench -p burn-ddp-benches --bench "$name" "$@" --no-run --message-format=json 2>>"$out/log" |
    sed -n "s/.*\"executable\":\"\([^\"]*\/$name-[^\"]*\)\".*/\1/p"
}
case ",$only," in *,all_reduce,*) all_reduce=$(executable all_reduce) ;; esac
case ",$only," in *,overlap,*) overlap_bench=$(executable overlap --features overlap) ;; esac

switch="burnddp$$s" hosts=() addresses=()
for i in $(seq 0 $((count - 1))); do
  hosts+=("burnddp$$h$i")
  addresses+=("10.213.0.$((i + 1))")
done
tidy() {
  trap - EXIT
  jobs -p | xargs -r kill 2>/dev/null || true
  for host in "${hosts[@]}" "$switch"; do ip netns del "$host" 2>/dev/null || true; done
}
trap tidy EXIT
for host in "${hosts[@]}"; do ip netns add "$host"; done
if [ "$count" = 2 ]; then
  ip link add link0 netns "${hosts[0]}" type veth peer name link0 netns "${hosts[1]}"
else
  ip netns add "$switch"
  ip -n "$switch" link add switch type bridge
  ip -n "$switch" link set switch up
  for i in "${!hosts[@]}"; do
    ip link add link0 netns "${hosts[$i]}" type veth peer name "port$i" netns "$switch"
    ip -n "$switch" link set "port$i" master switch up
    tc -n "$switch" qdisc add dev "port$i" root tbf rate "$rate" burst 256kb latency 50ms
  done
fi
for i in "${!hosts[@]}"; do
  ip -n "${hosts[$i]}" link set lo up
  ip -n "${hosts[$i]}" addr add "${addresses[$i]}/24" dev link0
  ip -n "${hosts[$i]}" link set link0 up
  # Packets of a veth are up to 64 KiB: a smaller bucket would never let them through.
  tc -n "${hosts[$i]}" qdisc add dev link0 root tbf rate "$rate" burst 256kb latency 50ms
done

# Memory that was freed stays with the process, as in compare.sh.
export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296

# One rank on each host, in the environment that torchrun would give it.
port=29500
ranks() { # program, arguments
  local pids=() i
  port=$((port + 1))
  for i in "${!hosts[@]}"; do
    ip netns exec "${hosts[$i]}" env RANK="$i" WORLD_SIZE="$count" LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK="$i" \
      MASTER_ADDR="${addresses[0]}" MASTER_PORT=$port BURN_DDP_IFACE=link0 RAYON_NUM_THREADS=1 "$@" </dev/null &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i"; done
}

# What iperf3 receives in each direction while both are busy, in Mbit/s.
iperf() {
  ip netns exec "${hosts[1]}" iperf3 -s -1 >"$out/iperf3-server" 2>&1 &
  local tries=0
  until ip netns exec "${hosts[0]}" iperf3 -c "${addresses[1]}" --bidir -t 5 -f m >"$out/iperf3" 2>&1; do
    tries=$((tries + 1))
    [ "$tries" -lt 50 ] || { say "iperf3 failed:"; cat "$out/iperf3" >&2; exit 1; }
    sleep 0.1 # until the server listens
  done
  awk '/receiver/ { for (i = 2; i <= NF; i++) if ($i == "Mbits/sec") printf "%s ", $(i - 1) } END { print "" }' "$out/iperf3"
}

if [ -n "${all_reduce:-}" ]; then
  read -r one other < <(iperf)
  ranks "$all_reduce" --bytes "$bytes" --csv "$out/all_reduce.csv"
  read -r after_one after_other < <(iperf)
  echo "iperf3 --bidir received $one and $other Mbit/s before, $after_one and $after_other after"
  awk -F, -v iperf="$one $other $after_one $after_other" '{ split(iperf, m, " "); link = (m[1] + m[2] + m[3] + m[4]) / 4; bus = $3 * 8 / $6 * 2 * ($4 - 1) / $4
    printf "all_reduce of %d bytes: %.1f ms, bus bandwidth %.0f Mbit/s, %.1f %% of iperf3\n", $3, $6 / 1e3, bus, 100 * bus / link }' "$out/all_reduce.csv"
fi
if [ -n "${overlap_bench:-}" ]; then
  ranks "$overlap_bench" --balance --csv "$out/overlap.csv" "${overlap[@]}"
fi
