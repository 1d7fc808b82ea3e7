"""Validation over all devices, and the pictures that a run keeps."""

from typing import Any

import jax
import numpy as np

from jaxtrain import config, metrics
from jaxtrain import mesh as meshes
from jaxtrain import step as steps
from jaxtrain.data.pipeline import ValidationBatches
from jaxtrain.state import Definition, State


class Evaluator:
    """Evaluates a state on the same examples each time.

    Args:
        definition: the model.
        rule: where arrays are stored.
        precision: dtype of the computation.
        target: shapes and shardings of the state.
        batches: of the validation split.
    """

    def __init__(
        self,
        definition: Definition,
        rule: meshes.Rule,
        precision: config.Precision,
        target: State,
        batches: ValidationBatches,
    ) -> None:
        def compiled(method: str) -> Any:
            step = steps.build_eval_step(definition, rule, precision=precision, method=method)
            return steps.jit_eval_step(step, target, rule.mesh)

        self._batches = batches
        self._target = target
        self._evaluate = compiled("evaluate")
        self._samples = compiled("samples") if definition.has("samples") else None

    def names(self) -> set[str]:
        """The names that :meth:`metrics` will give; nothing is computed."""
        spec = self._batches.spec
        sums = jax.eval_shape(self._evaluate, self._target.params, self._target.extras, spec)
        spreads = {f"val/{name}_std" for name, parts in sums.items() if len(parts) == 3}
        return {f"val/{name}" for name in sums} | spreads

    def metrics(self, state: State) -> dict[str, float]:
        """``val/NAME`` -> value, the same on every process."""
        sums: dict[str, np.ndarray] = {}
        for batch in self._batches:
            result = jax.device_get(self._evaluate(state.params, state.extras, batch))
            for name, parts in result.items():
                added = np.asarray(parts, np.float64)
                sums[name] = sums[name] + added if name in sums else added
        finished = metrics.finish({name: tuple(parts) for name, parts in sums.items()})
        return {f"val/{name}": value for name, value in finished.items()}

    def samples(self, state: State) -> dict[str, np.ndarray]:
        """Name -> uint8 picture [H, W, 3] of the first validation batch; {} if there are none."""
        if self._samples is None:
            return {}
        batch = next(iter(self._batches))
        pictures = jax.device_get(self._samples(state.params, state.extras, batch))
        return {name: np.asarray(picture) for name, picture in pictures.items()}
