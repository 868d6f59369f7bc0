"""Servers are processes: a mesh of devices refuses a plan that has some, when it is bound."""

from __future__ import annotations

import numpy as np
import pytest
from support.embedding import bind, code_of, mesh_of

from commplan.diagnostics import CommplanError


@pytest.mark.parametrize("name", ["easgd_async", "easgd_hogwild", "easgd_round_robin"])
def test_a_mesh_has_no_servers(name: str):
    tree = {"w": np.zeros(4, np.float32)}
    with pytest.raises(CommplanError, match="bind it to an mpi4py communicator") as error:
        bind(name, mesh_of(worker=4), {"params": tree, "center": tree})
    assert code_of(error) == "CP0851"
