"""One member of an ensemble, with its part of the plan and of the mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from commplan.runtime.context import Context
from commplan.runtime.run import Run
from commplan.runtime.run_input import RunInput
from commplan.tracebacks import public_face

if TYPE_CHECKING:
    from commplan.api import Program


@public_face
class Member(Run):
    """One member of an ensemble, made by `run.member(m)`, with a mesh of its devices.

    Its attributes are the phases without communication between members. `spmd`, `varying`, `tap`, `batches`
    and `init` work as on the run. Values have no dimension for the member.

    Members may have different architectures: compile the plan once for the shapes of each, and take every
    member from its own run. Their programs may run different numbers of steps.

    Attributes:
        mesh: The mesh of the member's devices; under MPI the communicator of the whole run.
        index: The index of the member along `axis`, from 0.
        axis: The name of the plan's ensemble.
    """

    def __init__(self, program: Program[Any], whole: Context, run_input: RunInput, place: int) -> None:
        super().__init__(program, whole.member(place), run_input)
        self.index, self._whole = place, whole
        (self.axis,) = self.context.members

    def __repr__(self) -> str:
        return f"<Member {self.index} of {self.axis}: {', '.join(self.phases)}>"

    def take(self, name: str, tree: Any) -> Any:
        """This member's part of arrays of the whole run; nothing is sent.

        Args:
            name: A value of the plan, whose placement the arrays have; see `run.sharding`.
            tree: A pytree of global arrays. Under MPI, this rank's arrays, which are returned as they are.

        Returns:
            The arrays on the member's mesh, without the dimension of the ensemble.

        Raises:
            CommplanError: CP0811 for an unknown name; CP0805 for arrays with another sharding.
        """
        placement = self._whole.placement(name)
        return self._whole.machine.part(name, tree, placement, self.axis, self.context.machine)
