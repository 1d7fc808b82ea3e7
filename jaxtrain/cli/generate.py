"""``jaxtrain generate``: completes a text."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jaxtrain import errors, terminal
from jaxtrain.checkpoint import resume
from jaxtrain.cli import commands
from jaxtrain.errors import InputError
from jaxtrain.inference.language_model import CausalModel
from jaxtrain.interop import hub, weights
from jaxtrain.ops.sampling import Choice
from jaxtrain.storage.atomic import LATEST, expanded
from jaxtrain.training import run_directory

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def main(flags: commands.Generate) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or no such model.
    """
    source = flags.source
    if source is None:
        if _is_model(flags.text):
            raise InputError(
                f'missing TEXT: give a prompt, such as {flags.text} "Once upon a time"'
            )
        source = _newest_run()
    choice = Choice(temperature=flags.temperature, top_k=flags.top_k, top_p=flags.top_p)
    model = CausalModel(hub.local(source), flags.precision)
    texts = model.texts(
        model.ids(
            model.encode(flags.text),
            tokens=flags.tokens,
            choice=choice,
            seed=flags.seed,
            samples=flags.samples,
            say=_note,
        )
    )
    _print(flags.text, texts, flags.samples)
    return 0


def _newest_run() -> Path:
    """Returns ``output/latest`` if its model can generate text, else the newest such run.

    Raises:
        InputError: no run has such a model.
    """
    for run in (expanded(run_directory.ROOT / LATEST), *resume.newest_runs(run_directory.ROOT)):
        with contextlib.suppress(InputError):  # of another program or version
            model = weights.model_at(run)
            if model is not None and model.task == "generate":
                return run
    raise InputError(
        f"missing SOURCE: no run in {run_directory.ROOT} has a causal language model: pass a "
        "checkpoint, a run directory, or a folder with weights and a tokenizer.json"
    )


def _is_model(text: str) -> bool:
    """Whether a text names a model, which means that the prompt is missing."""
    if hub.is_remote(text):
        return True
    # pathlib would raise for an unknown user and for a path that is too long.
    name = os.path.expanduser(text)
    return os.path.lexists(name) and weights.model_at(expanded(name)) is not None


def _print(prompt: str, texts: Iterator[list[str]], samples: int) -> None:
    """Prints the first text as it grows, and the others, which grow at the same time, after it."""
    on_terminal = sys.stdout.isatty()

    def show(text: str) -> None:
        print(errors.visible(text) if on_terminal else text, end="", flush=True)

    def begin(number: int) -> None:
        if samples > 1:
            print(f"--- completion {number} of {samples} ---")
        if on_terminal:
            print(_BOLD, end="")
        show(prompt)
        if on_terminal:
            print(_PLAIN, end="", flush=True)

    later = [""] * samples
    times: list[float] = []
    for grown in texts:
        times.append(time.monotonic())
        if len(times) == 1:  # the arguments were valid
            begin(1)
        show(grown[0])
        later = [before + more for before, more in zip(later, grown, strict=True)]
    print()
    for number, text in enumerate(later[1:], 2):
        begin(number)
        show(text)
        print()
    if on_terminal and len(times) > 2:  # the first two wait for the compiler
        rate = samples * (len(times) - 2) / (times[-1] - times[1])
        _note(f"{len(times):,} tokens, {rate:.1f} tokens/s (measured)")


def _note(text: str) -> None:
    sys.stdout.flush()
    terminal.warn(f"\nnote: {text}")
