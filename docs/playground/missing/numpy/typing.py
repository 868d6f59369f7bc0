"""Names for annotations."""

from numpy import Missing

NDArray = Missing("typing.NDArray")
ArrayLike = Missing("typing.ArrayLike")
DTypeLike = Missing("typing.DTypeLike")
