"""Gates: what a run must have reached by a step, or it ends there."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Self

_FORM = re.compile(r"\s*(\S+)\s*(>=|<=|>|<)\s*([-+.\deE]+)\s+at\s+(\d[\d_,]*)\s*")
_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Gate(NamedTuple):
    """A condition at the first validation from a step on.

    Attributes:
        metric: such as ``"val/psnr"``.
        relation: ``>``, ``>=``, ``<`` or ``<=``.
        value: that the metric is compared with.
        step: completed steps.
    """

    metric: str
    relation: str
    value: float
    step: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses ``"val/psnr > 24 at 5000"``.

        Raises:
            ValueError: it has another form; says which.
        """
        match = _FORM.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            step = int(re.sub("[_,]", "", match[4]))
            return cls(match[1], match[2], float(match[3]), step)
        except ValueError:
            raise ValueError(
                f"'{text}' is not METRIC > VALUE at STEP, such as 'val/psnr > 24 at 5000'"
            ) from None

    def __str__(self) -> str:
        """As it is typed."""
        return f"{self.metric} {self.relation} {self.value:g} at {self.step}"

    def is_met(self, value: float | None) -> bool:
        """Whether a value of the metric meets it; NaN, Inf, and None for them do not."""
        if value is None or not math.isfinite(value):
            return False
        return _RELATIONS[self.relation](value, self.value)

    def decided_by(
        self, validations: Iterable[tuple[int, Mapping[str, float]]]
    ) -> tuple[int, float] | None:
        """Returns what decides it: the first validation from its step on; None before that.

        Args:
            validations: (completed steps, values by metric name), in order.

        Returns:
            Its completed steps and its value of the metric.
        """
        for step, values in validations:
            if step >= self.step and self.metric in values:
                return step, values[self.metric]
        return None

    def decided_at(self, eval_every: int | None, total: int) -> int:
        """Returns the steps after which the validation comes that decides it.

        Args:
            eval_every: steps between validations; the last step has one in any case.
            total: steps of the run.
        """
        return total if eval_every is None else min(-(-self.step // eval_every) * eval_every, total)
