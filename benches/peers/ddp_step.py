"""A training step under PyTorch's DistributedDataParallel, gradient synchronization on against off: the shapes, steps
and times of `benches/train_step.rs`. `torchrun --standalone --nproc-per-node 2 ddp_step.py`."""

import argparse
import contextlib
import os
import sys
import time

import measure
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

HEADS = 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.norm_attention(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.contract(F.gelu(self.expand(self.norm_mlp(x))))


class Transformer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.layers))
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Training:
    def __init__(self, args):
        self.model = DistributedDataParallel(Transformer(args))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        shape = (args.batch, args.tokens)
        torch.manual_seed(dist.get_rank())
        self.inputs = torch.randint(0, args.vocabulary, shape)
        self.targets = torch.randint(0, args.vocabulary, shape).flatten()

    def backward(self, synchronize):
        self.optimizer.zero_grad()
        with contextlib.nullcontext() if synchronize else self.model.no_sync():
            F.cross_entropy(self.model(self.inputs).flatten(0, 1), self.targets).backward()

    def step(self, synchronize):
        self.backward(synchronize)
        self.optimizer.step()

    def verify(self):
        """Each gradient against the mean of all ranks' own."""
        self.backward(False)
        means = [parameter.grad.clone() for parameter in self.model.parameters()]
        for mean in means:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.backward(True)
        for mean, parameter in zip(means, self.model.parameters()):
            if (mean - parameter.grad).abs().max() > 1e-5 * mean.abs().max():
                sys.exit(f"torch: a gradient is not the mean over all ranks on rank {dist.get_rank()}")
        dist.barrier()


def timed(training, synchronize):
    """How long a step takes all ranks."""
    dist.barrier()
    start = time.perf_counter()
    training.step(synchronize)
    dist.barrier()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    shape = {"width": 512, "layers": 8, "tokens": 64, "batch": 4, "vocabulary": 5000}
    for name, default in (shape | {"steps": 24}).items():
        parser.add_argument(f"--{name}", type=int, default=default, help="(%(default)s)")
    measure.pin(parser)
    args = parser.parse_args()
    measure.bind(args, int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    training = Training(args)
    for _ in range(measure.WARM_UP):
        training.step(True)
    training.verify()
    pairs = [(timed(training, False), timed(training, True)) for _ in range(measure.WARM_UP + args.steps)]
    off, on = zip(*pairs[measure.WARM_UP:])
    if dist.get_rank() == 0:
        size_bytes = sum(parameter.numel() * 4 for parameter in training.model.parameters())
        added = [slow - fast for slow, fast in zip(on, off)]
        for bench, times in {"step_off": off, "step_on": on, "step_added": added}.items():
            measure.report(bench, size_bytes, dist.get_world_size(), "torch", times)
    dist.destroy_process_group()


main()
