"""A causal language model goes on with a text, which is printed as it comes.

SOURCE is a checkpoint, a run's directory (its best checkpoint, or else its newest) or a folder with
weights and a tokenizer.json; without it, the newest run of such a model below output/. A text ends
after --tokens, or where the model ends the document. Past the length that it was trained with the
model starts again from the last half of what it saw, and says so.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jaxtrain import errors, terminal
from jaxtrain.checkpoint import resume
from jaxtrain.cli import command_line
from jaxtrain.errors import InputError
from jaxtrain.inference import load
from jaxtrain.inference.language_model import CausalModel
from jaxtrain.interop import weights
from jaxtrain.ops.sampling import Choice
from jaxtrain.training import run_directory

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def main(arguments: list[str]) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or no such model.
    """
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    source = flags.source
    if source is None:
        if _is_model(flags.text):
            raise InputError(f"TEXT is missing: what shall the model at {flags.text} go on with?")
        source = _newest_run()
    choice = Choice(temperature=flags.temperature, top_k=flags.top_k, top_p=flags.top_p)
    model = CausalModel(source, flags.precision)
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
    """``output/latest``, or where its model does not continue texts, the newest run that does.

    Raises:
        InputError: there is none.
    """
    for run in (run_directory.ROOT / "latest", *resume.newest_runs(run_directory.ROOT)):
        with contextlib.suppress(InputError):  # of another program or version: not meant here
            model = weights.model_at(run)
            if model is not None and load.has(model, "decode_step"):
                return run
    raise InputError(
        f"SOURCE is missing, and no run in {run_directory.ROOT} holds a causal language model: "
        "name a checkpoint, the directory of a run, or a folder with weights and a tokenizer.json"
    )


def _is_model(text: str) -> bool:
    """Whether a text is the name of a model, and so what to go on with is missing."""
    # Not pathlib's, which raise where there is no such user and where a name is too long.
    name = os.path.expanduser(text)
    return os.path.lexists(name) and weights.model_at(Path(name)) is not None


def _print(prompt: str, texts: Iterator[list[str]], samples: int) -> None:
    """The first text as it comes, the others, which are written beside it, after it."""
    on_terminal = sys.stdout.isatty()

    def show(text: str) -> None:
        print(errors.visible(text) if on_terminal else text, end="", flush=True)

    def begin(number: int) -> None:
        if samples > 1:
            print(f"===== {number} of {samples}")
        if on_terminal:
            print(_BOLD, end="")
        show(prompt)
        if on_terminal:
            print(_PLAIN, end="", flush=True)

    later = [""] * samples
    times: list[float] = []
    for grown in texts:
        times.append(time.monotonic())
        if len(times) == 1:  # nothing is wrong with the use
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


def _parser() -> argparse.ArgumentParser:
    usage = (
        'jaxtrain generate [SOURCE] "Once upon a time" [--tokens N] [--temperature T] [--top-k K] '
        "[--top-p P] [--seed N] [--samples N]"
    )
    parser = command_line.bare_parser("generate", usage, __doc__)
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        type=command_line.named_file,
        nargs="?",
        help="a causal language model (default: the newest run of one below output/)",
    )
    add("text", metavar="TEXT", help="what it goes on with")
    add("--tokens", metavar="N", type=int, default=200, help="tokens to write, at most (200)")
    add(
        "--temperature",
        metavar="T",
        type=float,
        default=0.8,
        help="below 1 likely words become likelier (0.8); 0 always takes the likeliest",
    )
    add("--top-k", metavar="K", type=int, help="draw from the K likeliest words (all)")
    add(
        "--top-p",
        metavar="P",
        type=float,
        help="draw from the fewest words that together have this probability, 0 to 1 (all)",
    )
    add("--seed", metavar="N", type=int, default=0, help="of what is drawn (0)")
    add("--samples", metavar="N", type=int, default=1, help="texts to write (1)")
    command_line.add_precision(parser)
    return parser
