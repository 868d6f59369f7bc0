"""The evaluation of one rank's jaxpr without its peers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from commplan.lowering.jax.jaxprs import called_by, evaluate_alone, trace


def test_a_linear_solve_is_not_replaced_by_its_product() -> None:
    def solve(b: Array) -> Array:
        return lax.custom_linear_solve(lambda x: 2 * x, b, lambda _, b: b / 2, symmetric=True)

    program = trace(solve, jnp.ones(3))
    assert "custom_linear_solve" in str(program.jaxpr)
    (result,) = evaluate_alone(program.jaxpr, program.consts, [jnp.ones(3)])
    np.testing.assert_array_equal(result, np.full(3, 0.5))


def test_custom_derivatives_are_evaluated() -> None:
    program = trace(jax.nn.relu, jnp.arange(-1.0, 2.0))
    assert "custom_jvp_call" in str(program.jaxpr)
    (result,) = evaluate_alone(program.jaxpr, program.consts, [jnp.arange(-1.0, 2.0)])
    np.testing.assert_array_equal(result, [0, 0, 1])


def test_a_collective_may_have_more_operands_than_results() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))

    def exchange(x: Array, output: Array, counts: Array) -> Array:
        return lax.ragged_all_to_all(x, output, counts, counts, counts, counts, axis_name="data")

    mapped: Any = jax.shard_map(exchange, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    (equation,) = jax.make_jaxpr(mapped)(jnp.ones(8), jnp.ones(8), jnp.ones(4, int)).jaxpr.eqns
    ((body, consts),) = called_by(equation)
    operands = [jnp.arange(4.0), jnp.ones(4), jnp.ones(2, int)]
    (result,) = evaluate_alone(body, consts, operands)
    np.testing.assert_array_equal(result, operands[0])
