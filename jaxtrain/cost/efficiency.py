"""The measured fraction of its serial bound that a step reaches.

``bench --efficiency FILE`` writes it, and ``plan --efficiency FILE`` predicts with it.
"""

import dataclasses
import json
from pathlib import Path

from jaxtrain.errors import InputError, short_repr
from jaxtrain.storage import atomic

_HOW = "write one with jaxtrain bench NAME --efficiency FILE"
_RANGE = (1e-3, 2.0)  # caches may save some of the counted memory traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class Efficiency:
    """A measured step.

    Attributes:
        device: kind of GPU, as jax prints it.
        of_serial_bound: seconds of the step's serial bound
            (:func:`jaxtrain.cost.step_time.serial_bound`), divided by the median of the
            measured ones.
    """

    device: str
    config: str
    jax: str
    of_serial_bound: float


def load(path: Path) -> Efficiency:
    """Reads a file that ``bench`` wrote."""
    try:
        content = atomic.read_json(path)
        value = float(content["of_serial_bound"])
        if not _RANGE[0] <= value <= _RANGE[1]:
            raise ValueError(
                f"of_serial_bound {short_repr(content['of_serial_bound'])} is not one of a step"
            )
        texts = {name: str(content[name]) for name in ("device", "config", "jax")}
        return Efficiency(**texts, of_serial_bound=value)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: {_HOW}") from None
    except (ArithmeticError, KeyError, OSError, TypeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise InputError(f"{path} cannot be read as an efficiency file: {why}: {_HOW}") from None


def write(path: Path, measured: Efficiency) -> None:
    """Writes the file; replaces an earlier one."""
    atomic.write_whole(path, json.dumps(dataclasses.asdict(measured), indent=1).encode() + b"\n")
