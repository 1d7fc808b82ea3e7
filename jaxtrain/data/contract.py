"""The contract of the section ``data`` of a config: its base class."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from jaxtrain.config import bounds
from jaxtrain.data.source import ArrayTypes, Sources
from jaxtrain.jobs import resumable

MOST_PREPARATION_S = 30 * 60
"""What a run prepares at its start takes at most so long, unless the user allows more."""


class Estimate(NamedTuple):
    """What it takes to prepare something; estimated.

    Attributes:
        what: of what, such as "24 videos (4,585 frames)".
        core_s: seconds of one core.
        bytes: that it takes on disk.
    """

    what: str
    core_s: float
    bytes: float


class Preparation(Protocol):
    """Something that several processes can make together, such as a set of pieces of videos."""

    @property
    def estimate(self) -> Estimate:
        """Returns what it takes."""

    @property
    def folder(self) -> str:
        """Returns where it is made: a folder, or the URL of one in a bucket."""

    def begin(self, processes: int) -> None:
        """Makes the folder, in one process; raises InputError if its parts would take long."""

    def make(self, say: Callable[[str], None], part: resumable.Part, sharing: int) -> None:
        """Makes a part, with the cores that each of some sharing processes of this host has."""


class DataConfig(bounds.Section):
    """The data of a run. A subclass is a frozen, keyword-only dataclass with the fields below.

    Required: :meth:`open` and :meth:`arrays`. The arrays of each kind of data are listed in
    :mod:`jaxtrain.models.contract`.
    """

    section = "data"

    batch_size: int
    """Global batch size, over all devices and microbatches."""
    workers: int | None
    """Worker processes per host; None chooses them for the host, 0 loads in the main process."""
    prefetch: int
    """Batch parts that each worker loads in advance."""

    input_kind: ClassVar[str | None] = None
    """Key of the rates that ``plan`` assumes; None for videos, where it depends on the files."""
    most_workers: ClassVar[int | None] = None
    """Largest number of workers chosen for a host; None for no limit."""

    @property
    def block(self) -> int:
        """Returns how many successive training examples are read together (``Source.block``)."""
        return 1

    def open(self, model: Any, *, seed: int, say: Callable[[str], None]) -> Sources:
        """Opens both splits; makes or fetches what the cache lacks.

        Args:
            model: the run's model config, for the shapes of an example.

        Raises:
            InputError: none of the data can be used.
        """
        raise NotImplementedError

    def to_prepare(self, model: Any, say: Callable[[str], None]) -> Sequence["Preparation"]:
        """Returns what the cache lacks, which all processes make together before they open."""
        del model, say
        return ()

    def arrays(self, model: Any) -> ArrayTypes:
        """Returns shape and dtype of each array of an example, as the model receives it."""
        raise NotImplementedError

    def problems(self, model: Any) -> list[str]:
        """Returns what makes a run impossible, such as a missing file; opens and fetches none."""
        del model
        return []

    def training_model(self, model: Any) -> Any:
        """Returns the model's config for training batches, whose clips may be smaller."""
        return model

    def sent(self, spec: dict[str, Any], model: Any) -> dict[str, Any]:
        """Returns the arrays of a batch as the workers make them.

        Args:
            spec: the arrays that the model requires: ``batch_spec`` of :meth:`training_model`.
        """
        del model
        return spec

    def received(self, batch: dict[str, Any], model: Any) -> dict[str, Any]:
        """Returns the arrays that the model requires, from those of :meth:`sent`; jittable."""
        del model
        return batch

    def for_resume(self, checkpoint: Path) -> Self:
        """Returns the config for a resume, with the files that a checkpoint has for the data."""
        del checkpoint
        return self
