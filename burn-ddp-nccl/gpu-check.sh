#!/usr/bin/env bash
# Checks that need a GPU: burn-ddp-nccl/gpu-check.sh [DIR]
#
# Runs prebuilt programs of DIR (target/release, or target/debug) on this machine, the most important first, each with a
# time limit of its own, and prints a table. Exit code: 1 if a part failed; 2 and one line, without a table, where
# something is missing. To build for a machine with CUDA 12.8 or later, also where there is none:
#
#   export CUDARC_CUDA_VERSION=12080
#   cargo build --release -p burn-ddp-nccl --features check --bin nccl_check
#   cargo build --release -p burn-ddp-examples --features cuda --bin gpt --bin nccl_all_reduce
#
# With two GPUs or more it also runs NCCL on all of them. Where a GPU is small or slow: GPU_CHECK_BATCH (8 rows of 1024
# tokens) and GPU_CHECK_STEPS (35) for GPT, GPU_CHECK_LIMIT for seconds that each part may take, in place of its own.
set -u
shopt -s nullglob

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
dir=${1:-}
if [ -z "$dir" ]; then
  dir=$target/release
  [ -x "$dir/nccl_check" ] || dir=$target/debug
fi
dir=$(realpath -m "$dir")
# Variables of a launcher, or of an earlier experiment, would change the measurements.
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT BURN_DDP_COMM BURN_DDP_CONNECT_ALONE

tmp=$(mktemp -d) || exit 2
trap 'rm -rf "$tmp"' EXIT

first() {
  local file
  for file; do
    if [ -n "$file" ] && [ -e "$file" ]; then realpath -s "$file"; return; fi
  done
  return 1
}

# Path of a library in the linker's cache.
cached() { PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null | awk -v name="$1" 'index($1, name) == 1 { print $NF; exit }'; }

# --- requirements -----------------------------------------------------------------------------------------------------

sites=()
while IFS= read -r site; do [ -d "$site/nvidia" ] && sites+=("$site"); done < <(
  python3 -c 'import sys; print("\n".join(path for path in sys.path if path))' 2>/dev/null
)
cuda_roots=("${CUDA_PATH:-}" /usr/local/cuda /opt/cuda)
cuda_wheels=() nvrtc_wheels=() nccl_wheels=() header_wheels=()
for site in ${sites[@]+"${sites[@]}"}; do
  cuda_wheels+=("$site"/nvidia/cu[0-9]*)
  nvrtc_wheels+=("$site"/nvidia/cuda_nvrtc/lib/libnvrtc.so*)
  nccl_wheels+=("$site"/nvidia/*/lib/libnccl.so.2)
  header_wheels+=("$site"/nvidia/cuda_runtime/include/cuda_runtime.h)
done

missing=()
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
if [ "$gpus" = 0 ]; then
  missing+=("an NVIDIA driver with a GPU (nvidia-smi -L shows none): install the driver, or pass the GPUs into the container")
fi
nccl=$(first "${BURN_DDP_NCCL_LIB:-}" "$(cached libnccl.so.2)" ${nccl_wheels[@]+"${nccl_wheels[@]}"}) ||
  missing+=("libnccl.so.2: pip install nvidia-nccl-cu12, or the package libnccl2, or set BURN_DDP_NCCL_LIB")

# Compiler and headers should have one version: places with both come first.
nvrtc="" headers=""
for cuda in "${cuda_roots[@]}" ${cuda_wheels[@]+"${cuda_wheels[@]}"}; do
  [ -n "$cuda" ] || continue
  library=$(first "$cuda"/{lib64,lib}/libnvrtc.so "$cuda"/{lib64,lib}/libnvrtc.so.*) || continue
  if [ -e "$cuda/include/cuda_runtime.h" ]; then
    nvrtc=$library headers=$cuda/include
    break
  fi
done
if [ -z "$nvrtc" ]; then
  nvrtc=$(first ${nvrtc_wheels[@]+"${nvrtc_wheels[@]}"} "$(cached libnvrtc.so)") ||
    missing+=("libnvrtc.so: install the CUDA toolkit, or pip install nvidia-cuda-nvrtc-cu12")
  if file=$(first ${CUDA_PATH:+"$CUDA_PATH/include/cuda_runtime.h"} ${header_wheels[@]+"${header_wheels[@]}"} \
    /usr/local/cuda/include/cuda_runtime.h /usr/include/cuda_runtime.h); then
    headers=$(dirname "$file")
  else
    missing+=("cuda_runtime.h: install the CUDA toolkit and set CUDA_PATH, or pip install nvidia-cuda-runtime-cu12")
  fi
fi
if [ ${#missing[@]} -gt 0 ]; then
  text=$(printf '; %s' "${missing[@]}")
  echo "gpu-check: missing: ${text:2}" >&2
  exit 2
fi

# The programs load libraries by their plain names, and a library may load others from its own folder.
mkdir -p "$tmp/lib" "$tmp/cuda"
ln -s "$nvrtc" "$tmp/lib/libnvrtc.so"
ln -s "$headers" "$tmp/cuda/include"
# Each of CUDA 12's wheels has a folder of its own; the compiler searches the C++ headers in include/cccl.
cccl=$(dirname "$(dirname "$headers")")/cuda_cccl/include
if [ -d "$cccl" ] && [ ! -e "$headers/cccl" ]; then
  rm "$tmp/cuda/include" && mkdir "$tmp/cuda/include"
  ln -s "$headers"/* "$tmp/cuda/include/"
  ln -s "$cccl" "$tmp/cuda/include/cccl"
fi
export CUDA_PATH=$tmp/cuda BURN_DDP_NCCL_LIB=$nccl
LD_LIBRARY_PATH=$tmp/lib:$(dirname "$nvrtc"):$(dirname "$nccl"):/usr/local/nvidia/lib64:${LD_LIBRARY_PATH:-}
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH%:}

echo "driver   $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
nvidia-smi -L | grep '^GPU' | sed 's/^/device   /'
echo "NCCL     $(strings -a "$nccl" 2>/dev/null | grep -m 1 -o 'NCCL version [0-9.]*' || echo 'version not said'), $nccl"
echo "nvrtc    $nvrtc"
echo "headers  $headers"
echo "programs $dir"

# --- parts ------------------------------------------------------------------------------------------------------------

# All programs run in one directory, in which they cache the kernels that they chose and compiled for later runs.
cd "$tmp" || exit 1
printf '[autotune]\ncache = "local"\n[compilation]\ncache = "local"\n' >cubecl.toml

declare -A limit=([collectives]=30 [group]=50 [order]=60 [abort]=25 [gpt_first]=75 [gpt]=36 [cost]=45)
sum=$((limit[collectives] + limit[group] + limit[order] + limit[abort] + limit[gpt_first] + 5 * limit[gpt] + limit[cost]))
if [ "$gpus" -ge 2 ]; then
  limit[ring]=60
  sum=$((sum + 3 * limit[ring]))
fi
echo "limits   $sum s in all${GPU_CHECK_LIMIT:+, but $GPU_CHECK_LIMIT s for each part}"

rows=()
failed=0
# row PART PASS|FAIL SECONDS LINE
row() {
  rows+=("$(printf '%-22s | %-4s | %7s | %s' "$1" "$2" "$3" "$4")")
  [ "$2" = PASS ] || failed=$((failed + 1))
}

# Lines of the log with this verdict. A launcher prefixes each line with the rank.
said() { grep -E "$1" "^(\[[^]]*\] )?$2 " "$tmp/log"; }

# part NAME LIMIT PROGRAM ARGUMENTS..: a row, with the output in $tmp/log.
part() {
  local name=$1 seconds=$2 program=$3 started=$SECONDS code
  shift 3
  echo
  echo "== $name ($program $*)"
  if [ ! -x "$dir/$program" ]; then
    row "$name" FAIL 0 "$program is not in $dir: build it (see the head of this script)"
    return
  fi
  seconds=${GPU_CHECK_LIMIT:-$seconds}
  timeout -k 5 "$seconds" "$dir/$program" "$@" >"$tmp/log" 2>&1 </dev/null
  code=$?
  cat "$tmp/log"
  local spent=$((SECONDS - started)) line verdict=FAIL
  case $code in
    124 | 137) line="no end within $seconds s" ;;
    0)
      verdict=PASS
      line=$(tail -n 1 "$tmp/log")
      if [ "$program" = nccl_check ]; then
        line="$(said -c PASS) checks"
        # A program without output has checked nothing.
        if ! said -q PASS || said -q FAIL; then
          verdict=FAIL line="exit code 0, but: $line passed, $(said -c FAIL) failed"
        fi
      fi
      ;;
    *)
      line=$(said -m1 FAIL || tail -n 1 "$tmp/log")
      line="exit code $code: $line"
      ;;
  esac
  row "$name" "$verdict" "$spent" "$line"
}

part collectives "${limit[collectives]}" nccl_check collectives
part group "${limit[group]}" nccl_check group
part order "${limit[order]}" nccl_check order
part abort "${limit[abort]}" nccl_check abort

# gpt NAME LIMIT STEPS
gpt() {
  part "gpt $1" "$2" gpt --backend cuda --layers 12 --heads 12 --embd 768 --seq-len 1024 --tokenizer gpt2 \
    --batch-size "$batch" --total-batch-tokens $((batch * 1024)) --steps "$3" \
    --log-json "$tmp/${1// /-}.json"
}
# The median step of a run in ms, without the first ten.
median() {
  tail -n +11 "$1" 2>/dev/null | sed -n 's/.*"dt_ms":\([0-9.eE+-]*\).*/\1/p' | sort -g |
    awk '{ v[NR] = $1 } END { if (NR) print (v[int((NR + 1) / 2)] + v[int((NR + 2) / 2)]) / 2 }'
}
losses() { sed -n 's/.*"loss":\([0-9.eE+-]*\).*/\1/p' "$1" 2>/dev/null; }
# The largest difference of the losses of two runs.
apart() {
  paste <(losses "$1") <(losses "$2") |
    awk 'NF == 2 { d = $1 - $2; if (d < 0) d = -d; if (d > most) most = d; n++ } END { if (n) printf "%.9g", most }'
}
batch=${GPU_CHECK_BATCH:-8}
steps=${GPU_CHECK_STEPS:-35}
# The warm-up chooses and compiles kernels, so that later runs find them in the cache.
gpt "warm-up" "${limit[gpt_first]}" 3
# Plain and NCCL in turns, so that drift (clocks, temperature) affects both alike.
gpt "plain 1" "${limit[gpt]}" "$steps"
BURN_DDP_CONNECT_ALONE=1 BURN_DDP_COMM=nccl gpt "nccl 1" "${limit[gpt]}" "$steps"
gpt "plain 2" "${limit[gpt]}" "$steps"
BURN_DDP_CONNECT_ALONE=1 BURN_DDP_COMM=nccl gpt "nccl 2" "${limit[gpt]}" "$steps"
BURN_DDP_CONNECT_ALONE=1 BURN_DDP_COMM=host gpt "host" "${limit[gpt]}" "$steps"
times=() complete=yes
for run in plain-1 nccl-1 plain-2 nccl-2; do
  time=$(median "$tmp/$run.json")
  [ -n "$time" ] || complete=""
  times+=("${time:-0}")
done
if [ -n "$complete" ]; then
  host=$(median "$tmp/host.json")
  compared=$(awk -v a="${times[0]}" -v x="${times[1]}" -v b="${times[2]}" -v y="${times[3]}" -v host="$host" 'BEGIN {
    plain = (a + b) / 2; nccl = (x + y) / 2; ratio = nccl / plain
    beside = host == "" ? "not measured" : sprintf("%.2f ms, %.4f", host, host / plain)
    printf "%s plain %.2f ms (%.2f, %.2f), group of one by NCCL %.2f ms (%.2f, %.2f): %.4f (1.02 allowed: packing, fences); by the host %s",
      (ratio <= 1.02 ? "PASS" : "FAIL"), plain, a, b, nccl, x, y, ratio, beside
  }')
  row "gpt cost of a group" "${compared%% *}" - "${compared#* }"
  # Kernels may be chosen anew in each run; then two plain runs differ too, and NCCL may differ as much. If they do not,
  # a gradient that was in a bucket may still be fused with other operations, which rounds differently.
  plain=$(apart "$tmp/plain-1.json" "$tmp/plain-2.json") nccl=$(apart "$tmp/plain-1.json" "$tmp/nccl-1.json")
  verdict=$(awk -v plain="$plain" -v nccl="$nccl" \
    'BEGIN { print (plain != "" && nccl != "" && (nccl + 0 <= 10 * plain || nccl + 0 <= 1e-4)) ? "PASS" : "FAIL" }')
  row "gpt losses" "$verdict" - "largest difference, NCCL to plain: ${nccl:-unknown}; plain to plain: ${plain:-unknown} (10 times that, or 0.0001, is allowed)"
else
  row "gpt cost of a group" FAIL - "a run has no steps after the tenth"
  row "gpt losses" FAIL - "a run has no steps after the tenth"
fi

part cost "${limit[cost]}" nccl_check cost

if [ "$gpus" -ge 2 ]; then
  part "collectives on $gpus" "${limit[ring]}" nccl_check collectives --nproc "$gpus"
  part "group on $gpus" "${limit[ring]}" nccl_check group --nproc "$gpus"
  part "bandwidth on $gpus" "${limit[ring]}" nccl_all_reduce --nproc "$gpus" --min-bytes 1K --max-bytes 256M
fi

echo
printf '%-22s | %-4s | %7s | %s\n' part "" seconds ""
printf '%s\n' "${rows[@]}"
echo "$failed of ${#rows[@]} failed"
[ "$failed" = 0 ]
