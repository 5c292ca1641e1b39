"""all_reduce of f32 through Gloo: `torchrun --standalone --nproc-per-node 2 gloo_all_reduce.py`."""

import os

import measure
import torch
import torch.distributed as dist


def main():
    args = measure.arguments(__doc__).parse_args()
    measure.bind(args, int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    one = torch.zeros(1)
    measure.sweep(
        args,
        "gloo",
        dist.get_rank(),
        dist.get_world_size(),
        # The tensor is the array's memory.
        lambda array: dist.all_reduce(torch.from_numpy(array)),
        lambda: dist.all_reduce(one),
    )
    dist.destroy_process_group()


main()
