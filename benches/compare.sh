#!/usr/bin/env bash
# Ours beside Gloo, Open MPI, PyTorch DDP and the bound: same work, same machine, one run.
#
#   benches/compare.sh                                   # everything, 5 rounds of each block
#   benches/compare.sh --only all_reduce --rounds 2      # a few minutes
#
# Ours and the peers take turns, and the bound (peers/limit.c) runs before and after each turn. Shared machines have
# fast and slow modes several times apart: a round in which the two bounds differ by more than 1.3 (--differ; geometric
# mean of the factors over the sizes) is dropped and run again, until enough are kept or 15 (--tries) were run.
#
# Memory that was freed stays with the process, in ours and the peers: page faults would be most of the noise.
#
# Processes are not bound to cores, as torchrun and burnrun do not bind them, and mpirun is told not to; --pin binds
# rank r of every system to core r. The bound is always pinned. Threads of a process: one.
#
# The peers are installed into target/peers (PyPI; about 5 GB, since torch for x86-64 loads CUDA's libraries). What
# cannot be had leaves its column empty.
#
# Writes target/compare.csv and target/compare.svg, and prints tables.
set -euo pipefail
cd "$(dirname "$0")/.."

only="all_reduce,all_reduce4,step" rounds=5 tries=15 most=1.3 pin=""
usage() {
  echo "usage: benches/compare.sh [--only all_reduce,all_reduce4,step] [--rounds N] [--tries N] [--differ 1.3] [--pin]" >&2
  exit 2
}
while [ $# -gt 0 ]; do
  case "$1" in
    --only) only=${2:?}; shift 2 ;;
    --rounds) rounds=${2:?}; shift 2 ;;
    --tries) tries=${2:?}; shift 2 ;;
    --differ) most=${2:?}; shift 2 ;;
    --pin) pin=1; shift ;;
    *) usage ;;
  esac
done
for block in ${only//,/ }; do
  case "$block" in all_reduce | all_reduce4 | step) ;; *) usage ;; esac
done

out=$PWD/target/compare env=$PWD/target/peers peers=$PWD/benches/peers
rm -rf "$out"
mkdir -p "$out" "$env"
log=$out/log
cores=$(env -u OMP_NUM_THREADS nproc)
export RAYON_NUM_THREADS=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

say() { printf '%s\n' "$*" >&2; }

# --- what is compared

say "building (log: $log)"
executables=$(cargo bench -p burn-ddp-benches --bench all_reduce --bench train_step --no-run --message-format=json 2>>"$log" |
  sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
all_reduce=$(grep '/all_reduce-' <<<"$executables")
train_step=$(grep '/train_step-' <<<"$executables")
# Binaries are built along with benchmarks; alone they would be built with other features, and everything anew.
summary=$(grep '/compare$' <<<"$executables")

limit=""
if [ "$cores" -lt 2 ]; then
  say "one core: the bound needs two, so its column stays empty and no round is dropped"
elif command -v gcc >/dev/null; then
  flags=(-O3)
  [ "$(uname -m)" = x86_64 ] && grep -q avx2 /proc/cpuinfo && flags+=(-march=x86-64-v3)
  gcc "${flags[@]}" -o "$out/limit" "$peers/limit.c" && limit=$out/limit
else
  say "no gcc: the bound's column stays empty and no round is dropped"
fi

python=$env/bin/python torch="" mpi=""
if [ ! -x "$python" ]; then
  python3 -m venv "$env" >>"$log" 2>&1 || say "no Python with venv: the peers' columns stay empty"
fi
if [ -x "$python" ]; then
  install() { "$python" -m pip install -q --disable-pip-version-check "$@" >>"$log" 2>&1; }
  say "installing the peers into $env"
  # Their dependencies are listed whole: pip would add gigabytes that nothing loads.
  install --no-deps -r "$peers/requirements.txt" &&
    "$python" -c 'import torch; assert torch.distributed.is_gloo_available()' >>"$log" 2>&1 && torch=1
  [ -n "$torch" ] || say "PyTorch could not be installed (see $log): the columns of Gloo and PyTorch stay empty"
  if ! command -v mpirun >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get install -y --no-install-recommends openmpi-bin libopenmpi-dev ||
      { apt-get update && apt-get install -y --no-install-recommends openmpi-bin libopenmpi-dev; }; } >>"$log" 2>&1 || true
  fi
  command -v mpirun >/dev/null && install -r "$peers/requirements-mpi.txt" &&
    "$python" -c 'from mpi4py import MPI' >>"$log" 2>&1 && mpi=1
  [ -n "$mpi" ] || say "no Open MPI (Debian: openmpi-bin libopenmpi-dev): its column stays empty"
fi

# --- one run of each; measurements go to standard output, the rest to the log

run_limit() { [ -z "$limit" ] || timeout 300 "$limit" "$@" 2>>"$log"; }
run_torch() { # processes, program, arguments
  [ -n "$torch" ] || return 0
  local world=$1; shift
  timeout 900 "$python" -m torch.distributed.run --standalone --nproc-per-node "$world" "$@" ${pin:+--pin} 2>>"$log" | grep ',f32,' ||
    say "PyTorch failed: $* (see $log)"
}
run_mpi() { # processes, program, arguments
  [ -n "$mpi" ] || return 0
  local world=$1; shift
  timeout 900 mpirun --oversubscribe --bind-to none -n "$world" "$python" "$@" ${pin:+--pin} 2>>"$log" </dev/null ||
    say "Open MPI failed: $* (see $log)"
}
run_ours() { # program, arguments
  local program=$1; shift
  : >"$out/ours.csv"
  timeout 900 "$program" "$@" ${pin:+--pin} --csv "$out/ours.csv" >>"$log" 2>&1 </dev/null ||
    { say "ours failed: $program $* (see $log)"; tail -3 "$log" >&2; exit 1; }
  cat "$out/ours.csv"
}

KiB=1024 MiB=1048576
small=$((4 * KiB)),$((64 * KiB))
sizes=$small,$MiB,$((4 * MiB)),$((16 * MiB)),$((64 * MiB))
sizes4=$((4 * KiB)),$MiB,$((64 * MiB))
# As many elements as f32 has in 16 and 64 MiB, and as many bytes.
sizes16=$((8 * MiB)),$((16 * MiB)),$((32 * MiB)),$((64 * MiB))

block_all_reduce() {
  run_ours "$all_reduce" --bytes "$sizes"
  run_torch 2 "$peers/gloo_all_reduce.py" --bytes "$sizes"
  run_mpi 2 "$peers/mpi_all_reduce.py" --bytes "$sizes"
  run_ours "$all_reduce" --bytes "$sizes" --group
  run_ours "$all_reduce" --bytes "$sizes16" --dtype bf16
}
block_all_reduce4() {
  run_ours "$all_reduce" --nproc 4 --bytes "$sizes4"
  run_torch 4 "$peers/gloo_all_reduce.py" --bytes "$sizes4"
  run_mpi 4 "$peers/mpi_all_reduce.py" --bytes "$sizes4"
}
block_step() {
  run_ours "$train_step"
  run_torch 2 "$peers/ddp_step.py"
}

# Geometric mean over the sizes of the factor by which two runs of the bound differ.
differ() {
  awk -F, 'NR == FNR { time[$3] = $6; next } $3 in time { d = log($6 / time[$3]); sum += d < 0 ? -d : d; n++ }
    END { printf "%.2f", n ? exp(sum / n) : 1 }' "$1" "$2"
}

missing=0
: >"$out/rounds.csv"
round=0
for block in ${only//,/ }; do
  kept=0 dropped=0
  while [ "$kept" -lt "$rounds" ] && [ $((kept + dropped)) -lt "$tries" ]; do
    round=$((round + 1))
    run_limit ${sizes//,/ } >"$out/before.csv"
    "block_$block" >"$out/block.csv"
    run_limit ${sizes//,/ } >"$out/after.csv"
    factor=$(differ "$out/before.csv" "$out/after.csv")
    if awk "BEGIN { exit !($factor > $most) }"; then
      dropped=$((dropped + 1))
      say "$block, round $((kept + dropped)): dropped, the bound before and after differ by $factor"
      continue
    fi
    kept=$((kept + 1))
    say "$block, round $((kept + dropped)): kept, the bound before and after differ by $factor"
    cat "$out/block.csv" >"$out/kept.csv"
    # The bound is that of the blocks with two processes.
    [ "$block" != all_reduce ] || cat "$out/before.csv" "$out/after.csv" >>"$out/kept.csv"
    sed "s/^/$round,/" "$out/kept.csv" >>"$out/rounds.csv"
  done
  printf '%s: %d rounds kept, %d dropped\n' "$block" "$kept" "$dropped" | tee -a "$out/kept"
  [ "$kept" -ge "$rounds" ] || missing=1
done

echo "$cores cores of $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), Linux $(uname -r)"
"$summary" "$out/rounds.csv" --csv target/compare.csv --svg target/compare.svg
[ "$missing" = 0 ] || say "fewer rounds were kept than wanted: the machine was not quiet"
exit "$missing"
