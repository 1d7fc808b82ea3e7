"""Canaries in real runs: planted faults are noticed, and good runs are silent."""

import dataclasses
from pathlib import Path

import program
import pytest

from jaxtrain import config
from jaxtrain.config import files

pytestmark = pytest.mark.long

FROZEN = """
import optax
from jaxtrain.optim import build
correct = build.make_optimizer
def masked(*arguments):
    wrong = lambda params: {name: name.startswith(PARTS) for name in params}
    return optax.chain(correct(*arguments), optax.masked(optax.set_to_zero(), wrong))
build.make_optimizer = masked
"""
SHUFFLED = """
import jax.numpy as jnp
from jaxtrain.models import mlm
def shuffled(method):
    def with_others(self, batch, *keys):
        targets = jnp.roll(batch["targets"], (1, 3), (0, 1))
        return method(self, batch | {"targets": targets}, *keys)
    return with_others
mlm.MaskedLanguageModel.loss = shuffled(mlm.MaskedLanguageModel.loss)
mlm.MaskedLanguageModel.evaluate = shuffled(mlm.MaskedLanguageModel.evaluate)
"""
STILL_AVERAGE = """
import optax
from jaxtrain.optim import ema
correct = ema.averaging
def still(settings):
    def update(updates, state, params):
        return updates, state._replace(steps=state.steps + 1)
    return optax.GradientTransformation(correct(settings).init, update)
ema.averaging = still
"""
RUN = """
from jaxtrain import config
run = config.named("demo_mlm")
"""


def trained(folder: Path, file: str, *words: object) -> tuple[int, str]:
    """Runs the tiny masked LM from a config file; returns the exit code and what was printed."""
    program.write_corpus(folder, files=12, words=20_000)
    (folder / "fault.py").write_text(file + RUN)
    typed = [
        "--config",
        "fault.py",
        *program.TINY_MLM[2:],
        "--data.path",
        "corpus",
    ]
    typed += ["--mesh.fsdp", "1", "--loop.log_every", "50", "--output-dir", "run"]
    ended = program.run(folder, *typed, *words)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("file", "words", "code", "expected"),
    [
        (FROZEN.replace("PARTS", "'layers.0.'"), (), 0, "did not change from step"),
        (FROZEN.replace("PARTS", "''"), (), 4, "no parameter changed from step"),
        ("", ("--optim.peak_lr", "1e-30"), 4, "equal to the last digit"),
        (SHUFFLED, (), 4, "frequencies"),
    ],
    ids=["a wrong mask", "all masked", "no learning rate", "shuffled targets"],
)
def test_a_planted_fault_is_noticed(
    file: str, words: tuple[object, ...], code: int, expected: str, tmp_path: Path
) -> None:
    steps = ("--loop.steps", 1000, "--loop.eval_every", 50, "--loop.eval_examples", 1600)
    returned, printed = trained(tmp_path, file, *steps, *words)
    assert expected in printed, printed
    assert returned == code, printed


TINY = """
import dataclasses
from jaxtrain import config
base = config.named(NAME)
tiny = type(base.model).tiny()
if hasattr(tiny, "vocab_size"):  # as many as the tokenizers of all configs need
    tiny = dataclasses.replace(tiny, vocab_size=512)
if hasattr(tiny, "decoder_widths"):  # colors from the first step, as in demo
    tiny = dataclasses.replace(tiny, init="thumbnail")
optim = dataclasses.replace(base.optim, peak_lr=3e-3)  # the configs' are for larger models
data = base.data
if getattr(data, "crop", None):  # the configs' are larger than a tiny model's clips
    data = dataclasses.replace(data, crop=(tiny.height, tiny.width), max_crop_scale=1.0)
run = dataclasses.replace(base, model=tiny, optim=optim, data=data)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


def trained_tiny(folder: Path, cache: str, name: str, fault: str = "", *more: object) -> str:
    """Trains the tiny model of a config on the demo's data; returns what was printed."""
    (folder / "tiny.py").write_text(fault + TINY.replace("NAME", repr(name)))
    typed: list[object] = ["--config", "tiny.py", "--precision", "float32", "--data.demo", "True"]
    typed += ["--mesh.data", 1, "--mesh.fsdp", 1, "--data.workers", 1, "--data.batch_size", 8]
    typed += ["--optim.accumulate", 1, "--loop.epochs", "None", "--loop.tokens_per_param", "None"]
    typed += ["--optim.warmup_steps", "None", "--optim.warmup_fraction", 0.1]
    typed += ["--loop.steps", 300, "--loop.eval_every", 30, "--loop.eval_examples", 16]
    typed += ["--loop.log_every", 50, "--output-dir", "run"]
    ended = program.run(folder, *typed, *more, JAXTRAIN_CACHE=cache)
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 0, printed
    return printed


def kinds() -> list[str]:
    """Returns the first config of each combination of model, optimizer, schedule and sections."""
    first: dict[tuple[object, ...], str] = {}
    for name in files.names():
        run = config.named(name)
        sections = [
            (type(owner), field.name)
            for owner in (run.model, run.optim)
            for field in dataclasses.fields(owner)
            if dataclasses.is_dataclass(getattr(owner, field.name))
        ]
        first.setdefault((type(run.model), run.optim.schedule, *sections), name)
    return list(first.values())


@pytest.mark.parametrize("name", kinds())
def test_a_good_run_is_silent(name: str, tmp_path: Path, cache: str) -> None:
    printed = trained_tiny(tmp_path, cache, name)
    assert "warning" not in printed


def test_an_average_that_stays_is_noticed(tmp_path: Path, cache: str) -> None:
    flags = ("--optim.average.decay", 0.9)
    printed = trained_tiny(tmp_path, cache, "demo", STILL_AVERAGE, *flags)
    assert "warning: the average of the parameters" in printed
