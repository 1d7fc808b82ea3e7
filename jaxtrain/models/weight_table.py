"""Another implementation's names and layouts for a model's arrays, as a table, and the conversion.

Each row pairs an array of the other implementation with one of ours. The same table writes weights,
reads them, and names everything that does not fit.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jaxtrain.errors import InputError
from jaxtrain.storage import tensor_files

Tensors = Mapping[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]
_LISTED = 6


class Layout(NamedTuple):
    """How an array is stored elsewhere.

    Attributes:
        inward: their array -> ours.
        outward: our array -> theirs.
    """

    inward: Callable[[np.ndarray], np.ndarray]
    outward: Callable[[np.ndarray], np.ndarray]


def _kernel_in(tensor: np.ndarray) -> np.ndarray:
    return tensor.transpose(*range(2, tensor.ndim), 1, 0)


def _kernel_out(kernel: np.ndarray) -> np.ndarray:
    last = kernel.ndim - 1
    return kernel.transpose(last, last - 1, *range(last - 1))


SAME = Layout(lambda tensor: tensor, lambda array: array)
MATRIX = Layout(np.transpose, np.transpose)
"""[out, in] elsewhere, [in, out] here."""
KERNEL = Layout(_kernel_in, _kernel_out)
"""[out, in, (frames,) rows, columns] elsewhere, [(frames,) rows, columns, in, out] here."""
POINTWISE = Layout(lambda tensor: tensor[:, :, 0, 0].T, lambda array: array.T[:, :, None, None])
"""[out, in, 1, 1] elsewhere, [in, out] here."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The names of an array. ``{}`` in both stands for the number of a block: 0, 1, ...

    Attributes:
        theirs: its name elsewhere; several are equal parts of our last axis.
        optional: whether some of our models do not have it.
    """

    theirs: str | tuple[str, ...]
    ours: str
    layout: Layout = SAME
    optional: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Returns their names."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    def numbered(self, number: int) -> "Row":
        """Returns the row of one block."""
        theirs = tuple(name.format(number) for name in self.names)
        return Row(theirs, self.ours.format(number), self.layout)

    def outward(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Converts our array."""
        arrays = np.split(array, len(self.names), axis=-1) if len(self.names) > 1 else [array]
        return dict(zip(self.names, map(self.layout.outward, arrays), strict=True))

    def inward(self, tensors: Tensors) -> np.ndarray:
        """Converts their arrays, to float32."""
        arrays = [self.layout.inward(np.asarray(tensors[name], np.float32)) for name in self.names]
        return np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays, -1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightTable:
    """All arrays of a model in another implementation.

    Attributes:
        rows: the arrays, in the other implementation's order.
        unused: parts of names of arrays that are not parameters, such as tables of angles.
        tied: aliases, their second names of arrays -> names in the rows.
        complete: whether arrays in none of the rows are an error.
    """

    rows: tuple[Row, ...]
    unused: tuple[str, ...] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    complete: bool = True

    def outward(self, params: Tensors) -> dict[str, np.ndarray]:
        """Converts our arrays, by dotted path; skips those in none of the rows."""
        return {
            name: np.ascontiguousarray(tensor)
            for row in self._numbered(params)
            for name, tensor in row.outward(np.asarray(params[row.ours])).items()
        }

    def inward(
        self, tensors: Tensors, expected: Shapes, source: str, cure: str
    ) -> dict[str, np.ndarray]:
        """Converts their arrays, to float32.

        Args:
            expected: dotted path -> shape of each of our arrays.
        """
        unique = self._without_aliases(tensors, source)
        check(unique, self.shapes(expected), source, cure, extra=self.complete)
        return {row.ours: row.inward(unique) for row in self._numbered(expected)}

    def shapes(self, expected: Shapes) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of their arrays, from those of ours."""
        return {  # a broadcast array takes no memory
            name: tensor.shape
            for row in self._numbered(expected)
            for name, tensor in row.outward(
                np.broadcast_to(np.bool_(0), expected[row.ours])
            ).items()
        }

    def name(self, ours: str) -> str:
        """Returns their name of one of our arrays, as in its row."""
        return next(row.names[0] for row in self.rows if row.ours == ours)

    def _numbered(self, expected: Collection[str]) -> Iterator[Row]:
        for row in self.rows:
            if "{}" not in row.ours:
                if not row.optional or row.ours in expected:
                    yield row
                continue
            before, after = row.ours.split("{}")
            middles = (
                name[len(before) : len(name) - len(after)]
                for name in expected
                if name.startswith(before) and name.endswith(after)
            )
            # Not all blocks have each array.
            yield from map(row.numbered, sorted(int(m) for m in middles if m.isdecimal()))

    def _without_aliases(self, tensors: Tensors, source: str) -> dict[str, np.ndarray]:
        """Skips unused arrays and aliases; an alias alone stands for its array."""
        unique = {
            name: array
            for name, array in tensors.items()
            if name not in self.tied and not any(fragment in name for fragment in self.unused)
        }
        for name, kept in self.tied.items():
            if name in tensors and not np.array_equal(
                unique.setdefault(kept, tensors[name]), tensors[name]
            ):
                raise InputError(
                    f"{source}: {name} differs from {kept}, but this model has one array for both "
                    "(tie_word_embeddings)"
                )
        return unique


def check(
    tensors: Tensors, expected: Shapes, source: object, cure: str, *, extra: bool = True
) -> None:
    """Compares arrays with what a model has.

    Args:
        tensors: name -> array.
        expected: name -> shape of each array that is required.
        extra: whether other arrays are an error.
    """
    tensor_files.check_real({n: tensors[n] for n in expected if n in tensors}, str(source))
    complaints = {
        "missing": [name for name in expected if name not in tensors],
        "extra": sorted(set(tensors) - set(expected)) if extra else [],
        "misshapen": [
            f"{name} {tensors[name].shape} instead of {shape}"
            for name, shape in expected.items()
            if name in tensors and tensors[name].shape != tuple(shape)
        ],
    }
    listed = [
        f"{complaint}: {', '.join(names[:_LISTED])}"
        + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for complaint, names in complaints.items()
        if names
    ]
    if listed:
        raise InputError(f"{source} does not fit this model; {'; '.join(listed)}. {cure}")


def shapes_of(
    module: Callable[[], nnx.Module], kind: Any = nnx.Param
) -> dict[str, tuple[int, ...]]:
    """Returns dotted path -> shape of the arrays of a module, which is built without them."""
    paths = nnx.to_flat_state(nnx.state(nnx.eval_shape(module), kind))
    return {".".join(map(str, path)): leaf.get_value().shape for path, leaf in paths}
