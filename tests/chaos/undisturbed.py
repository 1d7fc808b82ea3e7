"""Executes the undisturbed run that all other runs are compared with."""

import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from chaos.launched import CHECKOUT, Launched
from program import TINY_MLM, write_corpus

# Four validations after a quarter of the run: a masked LM that learns only the frequencies in five
# of them, as this one does, ends its run.
STEPS, EVAL_EVERY, SAVE_EVERY = 60, 13, 6
# Longest time without a completed step before a run ends itself as hung. Process 1 compiles again
# at each start, and process 0 waits for it in its first step.
HANG_TIMEOUT_S = 40
_MODEL = {"hidden": 64, "ff": 128, "layers": 1, "heads": 2, "sequence_length": 64}
_KEEP_ALL = 1000
# Words per file of the corpus: enough for a second of preparation.
WORDS = 40_000


@dataclass(frozen=True)
class Undisturbed:
    """A run that completed without faults."""

    directory: Path
    seconds: float

    def checkpoint(self, step: int) -> Path | None:
        """Returns the checkpoint of a step, if any."""
        path = self.directory / "checkpoints" / f"{step}.json"
        return path if path.is_file() else None


def arguments(processes: int, workers: int, directory: Path | str, *, keep: int = 3) -> list[str]:
    """Returns the command line of a run: two devices, with sharding, validation and saves."""
    assert 2 % processes == 0, "two virtual devices are divided among the processes"
    fields = {f"model.{name}": value for name, value in _MODEL.items()}
    fields |= {
        "data.path": "corpus",
        "data.batch_size": 16,
        "data.workers": workers,
        "loop.record_examples": True,
        "mesh.fsdp": 2,
        "mesh.shard": "params",
        "optim.peak_lr": 1e-2,
        "loop.steps": STEPS,
        "loop.eval_every": EVAL_EVERY,
        "loop.eval_examples": 400,
        "loop.hang_timeout_s": HANG_TIMEOUT_S,
        "checkpoint.every": SAVE_EVERY,
        "checkpoint.keep": keep,
        "checkpoint.best_metric": "val/loss",
    }
    flags = [text for name, value in fields.items() for text in (f"--{name}", str(value))]
    return [*TINY_MLM, *flags, "--simulate-devices", "2", "--output-dir", str(directory)]


def prepare(work: Path, place: Path) -> None:
    """Creates a run's working directory; all runs use the same data."""
    place.mkdir(parents=True)
    if not (work / "corpus").is_dir():
        write_corpus(work, files=8, words=WORDS)
    (place / "corpus").symlink_to(work / "corpus")


def undisturbed(work: Path, processes: int, variables: dict[str, str]) -> Undisturbed:
    """Executes the undisturbed run, or returns an earlier one of the same code.

    Raises:
        RuntimeError: the run failed.
    """
    place = work / "undisturbed" / f"{processes}-{_code()}"
    record = place / "seconds.json"
    if not record.is_file():
        shutil.rmtree(place, ignore_errors=True)
        prepare(work, place)
        flags = arguments(processes, 0, place / "run", keep=_KEEP_ALL)
        began = time.monotonic()
        launched = Launched(
            processes,
            flags,
            place,
            place.name,
            variables | {"JAXTRAIN_CACHE": str(place / "cache")},
        )
        try:
            while launched.code() is None:
                time.sleep(0.1)
        finally:
            launched.close()
        seconds = time.monotonic() - began
        if launched.code() != 0:
            output = (place / "launcher.txt").read_text(errors="replace")
            raise RuntimeError(
                f"the undisturbed run ended with {launched.code()}:\n{output[-3000:]}"
            )
        record.write_text(json.dumps(seconds))
    return Undisturbed(place / "run", json.loads(record.read_text()))


def _code() -> str:
    """Returns a digest of jaxtrain, the configs and this file."""
    digest = hashlib.sha256()
    files = [*(CHECKOUT / "jaxtrain").rglob("*.py"), *(CHECKOUT / "configs").rglob("*.py")]
    for path in sorted([*files, Path(__file__)]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
