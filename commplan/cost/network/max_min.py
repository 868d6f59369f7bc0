"""Max-min fair shares: how flows divide the links that they use.

All rates grow together until a link is full or a flow is as fast as it gets; what is stuck stays, the others
grow on (progressive filling, Bertsekas and Gallager, "Data Networks", section 6.5.2).
"""

from __future__ import annotations

import numpy as np

from commplan.cost.network.network import Floats

FULL = 1e-9  # of a capacity: a link with less than this left is full


def max_min(use: Floats, capacity: Floats, most: Floats) -> Floats:
    """The rate of each flow [f].

    use [f, l]: what a flow takes of each link at rate 1 (0: it does not use it). capacity [l], above 0.
    most [f]: the highest rate of each flow, which may be infinite if it uses a link.
    """
    flows = len(most)
    rate = np.zeros(flows)
    growing = np.ones(flows, np.bool_)
    left = capacity.astype(np.float64)
    while growing.any():
        asked = use[growing].sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            until_full = np.where(asked > 0, left / asked, np.inf)
        step = min(float(until_full.min(initial=np.inf)), float((most - rate)[growing].min()))
        rate[growing] += step
        left = np.maximum(left - step * asked, 0.0)
        stuck = (use[:, left <= FULL * capacity] > 0).any(axis=1) | (rate >= most * (1 - FULL))
        growing &= ~stuck
    return rate
