"""Pytrees of plain containers without jax, and the shapes of their leaves.

Order and paths are those of `jax.tree_util` (`keystr(path, simple=True, separator="/")`) for dicts, lists,
tuples and named tuples. Other nodes require jax: see `commplan.lowering.jax.pytree`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, cast

from commplan.diagnostics import fail, type_of
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType

_Build = Callable[[Iterator[Any]], Any]  # builds a subtree, and takes its leaves from the iterator
_Make = Callable[[Any], Any]  # makes a container from its children, in order
Rebuild = Callable[[Sequence[Any]], Any]  # builds a tree from all its leaves
_NUMBERS = {bool: "bool", int: "i32", float: "f32"}  # dtypes of Python numbers


def flatten(tree: Any) -> tuple[list[tuple[str, Any]], Rebuild]:
    """Return the leaves of `tree` with their paths, and a function that rebuilds the tree from leaves.

    dict keys are sorted (an OrderedDict keeps its order). The node None has no leaves; all other nodes that
    are not containers are leaves. The path of a tree that is a leaf is empty.

    Raises:
        CommplanError: CP0720 for dict keys that cannot be sorted.
        RecursionError: the tree is nested too deep.
        ValueError: the returned function gets another number of leaves.

    >>> leaves, rebuild = flatten({"b": [1, 2], "a": None})
    >>> leaves
    [('b/0', 1), ('b/1', 2)]
    >>> rebuild([10, 20])
    {'a': None, 'b': [10, 20]}
    """
    leaves: list[tuple[str, Any]] = []
    build = _walk(tree, None, leaves, lambda _: False)
    return leaves, lambda values: build(_counted(values, len(leaves)))


def shapes_of(tree: Any) -> tuple[Leaf, ...]:
    """Convert the leaves of `tree` for the compiler.

    A leaf has `.shape` and `.dtype` (an array, a `jax.ShapeDtypeStruct`), is a dict `{"shape": [..], "dtype":
    ".."}`, or is a Python number (float f32, int i32, bool).

    Raises:
        CommplanError: CP0703 for an unsupported dtype; CP0720 for a leaf without a valid shape and a dtype,
            for two leaves with the same path, for dict keys that cannot be sorted, and for a tree that is
            nested too deep.
    """
    return leaves_of(_shape_leaves(tree))


def is_plain(tree: Any) -> bool:
    """Whether every leaf of `tree`, flattened as plain containers, is an array, a spec or a number.

    Raises CP0720 as `shapes_of` does for keys that cannot be sorted, and for a tree nested too deep.
    """
    leaves = [leaf for _, leaf in _shape_leaves(tree)]
    return all(is_like_spec(x) or isinstance(x, bool | int | float) or hasattr(x, "shape") for x in leaves)


def leaves_of(pairs: Iterable[tuple[str, Any]]) -> tuple[Leaf, ...]:
    """Convert pairs of path and leaf. Raises CP0720 for duplicate paths, and as `leaf_of` does."""
    leaves: dict[str, Leaf] = {}
    for path, leaf in pairs:
        if path in leaves:
            fail("CP0720", f"two leaves have the path `{path}`", "rename keys that contain a `/`")
        leaves[path] = leaf_of(path, leaf)
    return tuple(leaves.values())


def leaf_of(path: str, leaf: Any) -> Leaf:
    """Convert `leaf` (see `shapes_of`) to a `Leaf` at `path`.

    Raises:
        CommplanError: CP0703 for an unsupported dtype, CP0720 for a leaf without a valid shape and a dtype.
    """
    shape, dtype = _shape_and_dtype(path, leaf)
    if is_key_type(dtype):  # the last dimension has the words of a key
        return Leaf(path, (*shape, dtype.itemsize // DType.U32.nbytes), DType.U32)
    name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype)
    leaf_dtype = DType.from_name(name)
    if leaf_dtype is None:
        supported = ", ".join(t.numpy_name for t in DType)
        message = f"leaf `{path}` has dtype {name}, which plans do not support"
        note = "convert the leaf, or remove it from the tree that the plan receives"
        fail("CP0703", message, f"supported: {supported}", note)
    return Leaf(path, shape, leaf_dtype)


def is_key_type(dtype: Any) -> bool:
    """Whether `dtype` is that of JAX's typed random keys, which are transferred as u32[.., WORDS]."""
    return type(dtype).__name__ == "KeyTy"


def nest(paths: Sequence[str], values: Sequence[Any]) -> Any:
    """Build nested dicts from paths, as a saved schedule has no other structure.

    Leaves keep the order of `paths`: a dict whose keys are not sorted ("10" after "2") is an OrderedDict. A
    single value with an empty path is returned as it is.

    Raises:
        CommplanError: CP0720 if no nested dicts have these paths in this order, because of keys with a `/`.

    >>> nest(["a/b", "c"], [1, 2])
    {'a': {'b': 1}, 'c': 2}
    """
    if len(paths) == 1 and not paths[0]:
        return values[0]
    root: dict[str, Any] = {}
    for path, value in zip(paths, values, strict=True):
        *above, last = path.split("/")
        node = root
        for part in above:
            # If the key of a node is not the last one of its dict, other leaves are between its leaves.
            if part in node and (part != next(reversed(node)) or type(node[part]) is not dict):
                _fail_order(path)
            node = node.setdefault(part, {})
        if last in node:
            _fail_order(path)
        node[last] = (value,)  # not a dict, unlike the nodes
    return _in_order(root)


def _fail_order(path: str) -> NoReturn:
    message = f"leaf `{path}` has no place in nested dicts that keep the order of the leaves"
    fail("CP0720", message, "rename keys that contain a `/`")


def _in_order(node: Any) -> Any:
    """Unwrap leaves, and replace dicts whose keys are not sorted by OrderedDicts, which `flatten` keeps."""
    if type(node) is tuple:
        return cast("tuple[Any]", node)[0]
    inner = {key: _in_order(value) for key, value in cast("dict[str, Any]", node).items()}
    return inner if list(inner) == sorted(inner) else OrderedDict(inner)


def _shape_and_dtype(path: str, leaf: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and the dtype of a leaf. Raises CP0720 if either is missing, or for an invalid shape."""
    if type(leaf) in _NUMBERS:  # a NumPy scalar, which may be a float, has a dtype of its own
        return (), _NUMBERS[type(leaf)]
    if is_like_spec(leaf):
        spec = cast("Mapping[str, Any]", leaf)
        missing = next((key for key in ("shape", "dtype") if key not in spec), None)
        if missing is not None:
            subject = f"leaf `{path}`" if path else "a leaf"
            fail("CP0720", f"{subject} has no `{missing}`", 'such as {"shape": [3, 4], "dtype": "f32"}')
        shape, dtype = spec["shape"], spec["dtype"]
    else:
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        subject = f"leaf `{path}`" if path else "the value"
        message = f"{subject} is {type_of(leaf)}, which has no shape and dtype"
        note = (
            'expected arrays, jax.ShapeDtypeStruct, numbers or dictionaries `{"shape": [..], "dtype": ".."}`'
        )
        fail("CP0720", message, note)
    if not isinstance(shape, list | tuple) or not all(_is_dim(d) for d in cast("list[Any]", shape)):
        fail("CP0720", f"leaf `{path}` has the shape {shape!r}: expected a list of whole numbers >= 0")
    return tuple(int(d) for d in cast("list[Any]", shape)), dtype


def _is_dim(dim: Any) -> bool:
    return not isinstance(dim, bool) and hasattr(dim, "__index__") and int(dim) >= 0


def is_like_spec(node: Any) -> bool:
    """Whether the node is a mapping with the keys `shape` and `dtype`.

    A mapping with just one of these keys and a valid value counts too: the missing key is then an error.
    """
    if not isinstance(node, Mapping):
        return False
    spec = cast("Mapping[Any, Any]", node)
    if set(spec) == {"shape"}:
        shape = spec["shape"]
        return isinstance(shape, list | tuple) and all(type(d) is int for d in cast("list[Any]", shape))
    return set(spec) == {"shape", "dtype"} or (set(spec) == {"dtype"} and isinstance(spec["dtype"], str))


def _counted(values: Sequence[Any], expected: int) -> Iterator[Any]:
    """Iterate over `values`. Raises ValueError if their number is not `expected`."""
    if len(values) != expected:
        raise ValueError(f"expected {expected} leaves, found {len(values)}")
    return iter(values)


def _shape_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree of shapes. Raises CP0720 if it exceeds Python's recursion limit."""
    leaves: list[tuple[str, Any]] = []
    try:
        _walk(tree, None, leaves, is_like_spec)
    except RecursionError:
        fail("CP0720", "the tree of shapes is nested too deep", "flatten it, such as into a list of layers")
    return leaves


def _walk(
    node: Any, path: str | None, leaves: list[tuple[str, Any]], is_leaf: Callable[[Any], bool]
) -> _Build:
    """Append the leaves of `node` with their paths to `leaves`, and return a function that rebuilds it.

    Args:
        node: the subtree.
        path: its path; None for the root.
        leaves: receives the leaves.
        is_leaf: whether a container is a leaf.
    """
    if node is None:
        return lambda _: None
    container = None if is_leaf(node) else _container(node, path)
    if container is None:
        leaves.append((path or "", node))
        return next
    children, make = container
    prefix = "" if path is None else f"{path}/"
    parts = [_walk(child, f"{prefix}{key!s}", leaves, is_leaf) for key, child in children]
    return lambda values: make([part(values) for part in parts])


def _container(node: Any, path: str | None) -> tuple[Iterable[tuple[Any, Any]], _Make] | None:
    """The keys and children of a container, and a function that rebuilds it; None for other nodes."""
    if isinstance(node, dict):
        items = cast("dict[Any, Any]", node)
        ordered = isinstance(node, OrderedDict)
        keys = list(items) if ordered else _ordered(items, path)
        kind = cast("_Make", OrderedDict if ordered else dict)
        return [(key, items[key]) for key in keys], lambda new: kind(zip(keys, new, strict=True))
    if isinstance(node, tuple) and hasattr(cast("Any", node), "_fields"):
        named_tuple = cast("Any", node)
        return zip(named_tuple._fields, named_tuple, strict=True), lambda new: type(named_tuple)(*new)
    if isinstance(node, list | tuple):
        return enumerate(cast("list[Any]", node)), list if isinstance(node, list) else tuple
    return None


def _ordered(node: dict[Any, Any], path: str | None) -> list[Any]:
    """The sorted keys of the dict at `path`. Raises CP0720 if they cannot be sorted."""
    try:
        return sorted(node)
    except TypeError:
        kinds = ", ".join(sorted({type(key).__name__ for key in node}))
        subject = f"of `{path}`" if path else "of the tree"
        return fail(
            "CP0720",
            f"the keys {subject} cannot be sorted: they are of the types {kinds}",
            "use keys of one type",
        )
