"""A backend in one process: phases run on NumPy arrays, rank after rank. For documentation and tests.

`NumpyRun` needs neither JAX nor MPI. It runs the ops of a schedule as the other backends do, but adds the
terms of a sum in the order of the ranks, whatever the algorithm.
"""

from commplan.lowering.numpy.run import NumpyRun as NumpyRun
