"""all_reduce of f32 through MPI: `mpirun --oversubscribe -n 2 python mpi_all_reduce.py`."""

import measure
import numpy as np
from mpi4py import MPI


def main():
    args = measure.arguments(__doc__).parse_args()
    world = MPI.COMM_WORLD
    measure.bind(args, world.rank)
    one = np.zeros(1, dtype=np.float32)

    def all_reduce(array):
        world.Allreduce(MPI.IN_PLACE, array, MPI.SUM)

    measure.sweep(args, "mpi", world.rank, world.size, all_reduce, lambda: all_reduce(one))


main()
