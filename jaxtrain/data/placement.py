"""Places the rows that this process has read on its devices, as parts of global arrays."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxtrain.errors import InputError
from jaxtrain.sharding import batch_sharding, local_rows

HostArrays = dict[str, np.ndarray]
Spec = dict[str, jax.ShapeDtypeStruct]


class Placement:
    """Turns the parts of a local batch into global arrays, after a check against the spec.

    Args:
        limits: the number of valid values of arrays of indices (``ModelConfig.index_limits``).
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, spec: Spec, limits: Mapping[str, int] | None = None
    ) -> None:
        self._limits = limits or {}
        self._sharding = batch_sharding(mesh)
        self._spec = spec
        self._first = local_rows(mesh, batch_size_of(spec)).start
        # On a CPU, jax arrays would share Grain's memory and free it too late at exit.
        self._copy_if_cpu = np.array if mesh.devices.flat[0].platform == "cpu" else np.asarray

    def __call__(self, local: Sequence[HostArrays]) -> dict[str, jax.Array]:
        """Returns the global arrays; each process passes its own rows.

        Raises:
            InputError: the rows have other arrays than the spec, or indices beyond their limits.
        """
        actual = {name: (array.shape[1:], str(array.dtype)) for name, array in local[0].items()}
        expected = {name: (array.shape[1:], str(array.dtype)) for name, array in self._spec.items()}
        if actual != expected:
            differences = [
                f"{name} is {actual.get(name, 'missing')} in the data and "
                f"{expected.get(name, 'not')} in the model"
                for name in sorted(actual.keys() | expected.keys())
                if actual.get(name) != expected.get(name)
            ]
            raise InputError(
                f"the data has other arrays than the model: {'; '.join(differences)}: correct the "
                "model's batch_spec (jaxtrain/models/contract.py lists the arrays of each data set)"
            )
        for name in self._limits.keys() & actual.keys():
            self._check_indices(name, [rows[name] for rows in local])
        return {
            name: self._placed(array.shape, [rows[name] for rows in local])
            for name, array in self._spec.items()
        }

    def _check_indices(self, name: str, parts: Sequence[np.ndarray]) -> None:
        """Checks indices here: on the devices, those beyond an array give NaN or another row."""
        limit, minimum = self._limits[name], -1 if name == "targets" else 0  # -1 is not predicted
        for part in parts:
            for value in (part.min(initial=0), part.max(initial=0)):
                if not minimum <= value < limit:
                    raise InputError(
                        f"{name} has the index {value} in the data, but the model has {limit} (0 "
                        f"to {limit - 1}): use the data's tokenizer, and the model.vocab_size and "
                        "model.sequence_length that fit it"
                    )

    def _placed(self, shape: tuple[int, ...], parts: Sequence[np.ndarray]) -> jax.Array:
        def device_rows(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "batches are divided over all devices"
            begin, end, _ = index[0].indices(shape[0])
            views = _rows(parts, begin - self._first, end - self._first)
            return self._copy_if_cpu(views[0]) if len(views) == 1 else np.concatenate(views)

        return jax.make_array_from_callback(shape, self._sharding, device_rows)


def _rows(parts: Sequence[np.ndarray], begin: int, end: int) -> list[np.ndarray]:
    """Returns rows ``begin`` to ``end`` of the concatenated parts, as views; no view is empty."""
    views, first = [], 0
    for part in parts:
        views.append(part[max(begin - first, 0) : max(end - first, 0)])
        first += len(part)
    return [view for view in views if len(view)]


def batch_size_of(spec: Spec) -> int:
    """Returns the number of rows of a global batch."""
    return int(next(iter(spec.values())).shape[0])
