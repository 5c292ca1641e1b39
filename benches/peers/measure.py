"""What the peers' programs share: the values of `src/pattern.rs`, their arguments, and one line per measurement."""

import argparse
import os
import sys
import time

import numpy as np

PERIOD = 65521
WARM_UP = 3
UNITS = {"": 0, "B": 0, "KiB": 10, "MiB": 20, "GiB": 30}


def size(text):
    """`64KiB` in bytes."""
    digits = text.rstrip("BGKMi")
    return int(digits) << UNITS[text[len(digits):]]


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    sizes = "4KiB,64KiB,1MiB,4MiB,16MiB,64MiB"
    parser.add_argument("--bytes", default=sizes, help="sizes on one rank (%(default)s)")
    counts = "of each size; else from 10 for large ones to 400 for small ones"
    parser.add_argument("--iterations", type=int, help=counts)
    pin(parser)
    return parser


def pin(parser):
    """Adds `--pin`."""
    parser.add_argument("--pin", action="store_true", help="bind rank r to core r")


def bind(args, local_rank):
    if args.pin:
        os.sched_setaffinity(0, {local_rank % os.cpu_count()})


def iterations(args, size_bytes):
    return args.iterations or min(400, max(10, (256 << 20) // size_bytes))


def pattern(count, factor):
    """What rank `factor - 1` puts in; the sum over N ranks is the one with `factor` N (N + 1) / 2."""
    index = np.arange(PERIOD, dtype=np.int64)
    block = (((index * 40503) >> 7) % 61 + 1) * factor
    return np.resize(block.astype(np.float32), count)


def report(bench, size_bytes, world, system, times):
    """`bench,dtype,bytes,world,system,median,minimum`, times given in seconds and printed in µs."""
    times = sorted(times)
    median, minimum = times[len(times) // 2] * 1e6, times[0] * 1e6
    print(f"{bench},f32,{size_bytes},{world},{system},{median:.3f},{minimum:.3f}", flush=True)


def sweep(args, system, rank, world, all_reduce, align):
    """Times `all_reduce(array)` of every size in place, verified on every rank before and after."""
    for size_bytes in map(size, args.bytes.split(",")):
        count = size_bytes // 4
        mine, total = pattern(count, rank + 1), pattern(count, world * (world + 1) // 2)
        array = np.zeros(count, dtype=np.float32)

        def verify():
            array[:] = mine
            all_reduce(array)
            if not np.array_equal(array, total):
                sys.exit(f"{system}: all_reduce of {size_bytes} bytes is wrong on rank {rank}")
            align()

        verify()
        # Sums of sums overflow, zeros do not.
        array[:] = 0
        times = []
        for _ in range(WARM_UP + iterations(args, size_bytes)):
            align()
            start = time.perf_counter()
            all_reduce(array)
            times.append(time.perf_counter() - start)
        verify()
        if rank == 0:
            report("all_reduce", size_bytes, world, system, times[WARM_UP:])
