"""Block formats of wires: floats as small numbers with a scale for each block.

The elements of a row are cut into blocks; the last one may be shorter. The scale of a block is its largest
magnitude over `largest`, rounded up to bf16. An element is sent as the number of the format nearest to
element / scale, ties to even. All of it is computed in f32. An encoded row is its numbers, followed by the
scales. The lower half of a byte of `int4` is the first of two elements.

- A block with a NaN or an infinity has the scale NaN: all of its elements are received as NaN.
- A block whose magnitudes are all below 2**-100 has the scale 0: its elements are received as 0. Smaller
  scales would be computed with denormals, which backends treat differently.
- An element beyond the range of the received type is received as the largest finite value of its sign.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from commplan.ir.roles import Meaning

CodecName = Literal["int8", "int4", "f8e4m3"]
LARGEST_BLOCK = 65_536
SMALLEST = 2.0**-100  # the least magnitude of a block that is not received as zeros
_BITS: dict[CodecName, int] = {"int8": 8, "int4": 4, "f8e4m3": 8}
_LARGEST: dict[CodecName, float] = {"int8": 127.0, "int4": 7.0, "f8e4m3": 448.0}


class Codec(msgspec.Struct, frozen=True, gc=False):
    """A block format, as in `wire = int8(block = 32)`.

    Attributes:
        name: The numbers: 8-bit or 4-bit integers of a symmetric range, or 8-bit floats (e4m3).
        block: The elements that share a scale, a multiple of 8.
    """

    name: Meaning[CodecName]
    block: Meaning[Annotated[int, msgspec.Meta(ge=8, le=LARGEST_BLOCK, multiple_of=8)]]

    @property
    def violation(self) -> str | None:
        """The rule of the block size, if it is violated."""
        if self.block % 8 == 0 and 8 <= self.block <= LARGEST_BLOCK:
            return None
        return f"a block has a multiple of 8 elements, at most {LARGEST_BLOCK:,}, found `{self.block}`"

    def __str__(self) -> str:
        return f"{self.name}(block = {self.block})"

    @property
    def largest(self) -> float:
        """The largest number that is sent."""
        return _LARGEST[self.name]

    def blocks(self, size: int) -> int:
        """The number of blocks in a row of `size` elements."""
        return -(-size // self.block)

    def payload(self, size: int) -> int:
        """The bytes of the numbers of a row of `size` elements, without scales."""
        return -(-size * _BITS[self.name] // 8)

    def nbytes(self, size: int) -> int:
        """The bytes of an encoded row of `size` elements."""
        return self.payload(size) + 2 * self.blocks(size)
