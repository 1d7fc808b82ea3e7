"""What :func:`jaxtrain.train` returns: a run directory, read on access."""

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import pointer
from jaxtrain.errors import DONE, EXIT_CODES
from jaxtrain.reporting import run_files
from jaxtrain.telemetry.samples import FOLDER, step_of

_SHOWN = ("loss", "psnr", "ssim", "accuracy", "pseudo_perplexity", "bits_per_byte")
_LARGEST_IMAGE = 2**21  # bytes, embedded in the notebook


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """A run that has ended.

    Attributes:
        exit_code: 0 if the run reached its end; docs/reference/exit-codes.md has the others.
    """

    directory: Path
    exit_code: int

    @property
    def finished(self) -> bool:
        """Whether the run reached its end. A run that was stopped can be resumed."""
        return self.exit_code == DONE

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One record per logged step, in order: ``pandas.DataFrame(result.metrics)`` reads it.

        Keys are ``step``, ``time`` (seconds since 1970), and names such as ``train/loss``.
        """
        records = run_files.read(self.directory, self.directory.name, holder="").records
        return [dict(record) for record in records]

    @property
    def samples(self) -> list[Path]:
        """Images, clips, and texts of the validations, those of the newest step last."""
        steps = {path: step_of(path) for path in (self.directory / FOLDER).glob("*")}
        files = [path for path, step in steps.items() if step is not None]
        return sorted(files, key=lambda path: (steps[path], path.name))

    @property
    def checkpoints(self) -> list[Path]:
        """The complete checkpoints that are kept, the newest last."""
        folder = self.directory / pointer.CHECKPOINTS
        paths = [folder / f"{step}.json" for step in pointer.steps(folder)]
        return [path for path in paths if pointer.is_complete(path)]

    @property
    def best(self) -> Path | None:
        """The best checkpoint by ``checkpoint.best_metric``; None if no validation has run."""
        return pointer.newest_complete(self.directory / pointer.BEST)

    @property
    def report(self) -> Path:
        """The report page; written on access if it is missing or older than the metrics."""
        from jaxtrain.reporting import page

        path, metrics = self.directory / page.NAME, self.directory / run_files.METRICS
        # A run that was stopped before its first record has no metrics.
        recorded = metrics.stat().st_mtime if metrics.exists() else 0.0
        if not path.exists() or path.stat().st_mtime < recorded:
            page.write([self.directory], path, holders=[""])
        return path

    def __repr__(self) -> str:
        """One line: where the run is, how far it got, and its newest values."""
        records = self.metrics
        values = ", ".join(f"{name} {value:.4g}" for name, value in newest(records).items())
        step = records[-1]["step"] if records else 0
        ended = "finished" if self.finished else EXIT_CODES.get(self.exit_code, "stopped")
        return (
            f"TrainResult({str(self.directory)!r}: {ended}, step {step}{values and ', '}{values})"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: first and newest values, and the newest sample image."""
        records = self.metrics
        last = newest(records)
        first = newest(records[::-1])
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{first[name]:.4g}</td><td>{value:.4g}</td></tr>"
            for name, value in last.items()
        )
        image = next((path for path in self.samples[::-1] if path.suffix == ".png"), None)
        figure = ""
        if image is not None and image.stat().st_size <= _LARGEST_IMAGE:
            data = base64.b64encode(image.read_bytes()).decode()
            figure = (
                f'<img alt="{html.escape(image.stem)}" style="max-width: 100%; display: block" '
                f'src="data:image/png;base64,{data}">'
            )
        return (
            f"<div><p><code>{html.escape(repr(self))}</code></p>"
            f"<table><tr><th>metric</th><th>first</th><th>newest</th></tr>{rows}</table>{figure}</div>"
        )


def newest(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The last value of each metric that shows how a run went; names as recorded."""
    values: dict[str, float] = {}
    for record in records:
        for kind in ("train", "val"):
            for name in _SHOWN:
                if (value := record.get(f"{kind}/{name}")) is not None:
                    values[f"{kind}/{name}"] = float(value)
    return dict(sorted(values.items()))
