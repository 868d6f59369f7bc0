"""Max-min fair rates of flows on shared links.

All rates grow together until a link is full or a flow reaches its maximum. These flows keep their rate, and
the others grow further (progressive filling, Bertsekas and Gallager, "Data Networks", section 6.5.2).
"""

from __future__ import annotations

import numpy as np

from commplan.cost.network.network import Floats

FULL = 1e-9  # a link is full if less than this fraction of its capacity is left


def max_min(use: Floats, capacity: Floats, maximum: Floats) -> Floats:
    """The rate of each flow [f].

    Args:
        use: The load of each flow on each link at rate 1; 0 if it does not use the link; [f, l].
        capacity: The capacity of each link, positive; [l].
        maximum: The maximum rate of each flow; may be infinite for flows that use a link; [f].
    """
    flows = len(maximum)
    rate = np.zeros(flows)
    growing = np.ones(flows, np.bool_)
    free = capacity.astype(np.float64)
    while growing.any():
        demand = use[growing].sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            until_full = np.where(demand > 0, free / demand, np.inf)
        step = min(float(until_full.min(initial=np.inf)), float((maximum - rate)[growing].min()))
        rate[growing] += step
        free = np.maximum(free - step * demand, 0.0)
        stuck = (use[:, free <= FULL * capacity] > 0).any(axis=1) | (rate >= maximum * (1 - FULL))
        growing &= ~stuck
    return rate
