"""``jaxtrain evaluate`` of a language model."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain import terminal, versions
from jaxtrain.cli import commands
from jaxtrain.data.text import documents
from jaxtrain.errors import BadExample, InputError
from jaxtrain.inference import fill_mask, language_model
from jaxtrain.inference.fill_mask import MaskedModel
from jaxtrain.inference.language_model import CausalModel
from jaxtrain.interop import weights
from jaxtrain.models.contract import Task
from jaxtrain.storage import addresses, atomic
from jaxtrain.telemetry import progress_bar

KINDS: dict[Task, type[MaskedModel] | type[CausalModel]] = {
    "fill": MaskedModel,
    "generate": CausalModel,
}
"""A model's task, and the class that uses it."""

_ROWS = 16


def main(
    flags: commands.Evaluate, source: Path, kind: type[MaskedModel] | type[CausalModel]
) -> int:
    """Runs the command; :mod:`jaxtrain.cli.evaluate` calls it if SOURCE is a language model.

    Args:
        flags: of the command.
        source: the model.
        kind: the class that measures this kind of model.

    Raises:
        InputError: wrong use, or nothing can be measured.
    """
    data, rows = atomic.expanded(flags.data), flags.rows or _ROWS
    atomic.check_writable("--json", flags.json)
    _check_readable(data)
    _warn_of_training_text(source, data)
    model = kind(source, flags.precision, command="evaluate")
    most = None if flags.max_tokens is None else flags.max_tokens + 2 * model.longest
    try:
        texts = documents.texts(data, flags.text_field, model.count, most)
    except BadExample as error:
        raise InputError(f"--data {flags.data}: {error.reason}") from error
    except OSError as error:
        raise InputError(f"--data {flags.data} cannot be read: {error.strerror}") from error
    try:
        with _progress("windows" if kind is CausalModel else "tokens") as each:
            found = model.score(texts, rows=rows, max_tokens=flags.max_tokens, each=each)
    except InputError as error:
        raise InputError(f"--data {flags.data}: {error}") from error
    terminal.out(_report(found, model, flags))
    if flags.json:
        content = {
            "source": model.source,
            "data": str(data),
            "max_tokens": flags.max_tokens,
            "precision": flags.precision,
            "versions": versions.line(),
            **dataclasses.asdict(found),
            **_derived(found),
        }
        atomic.write_whole(flags.json, json.dumps(content, indent=2) + "\n")
        terminal.out(f"wrote {flags.json}")
    return 0


def _warn_of_training_text(source: Path, text: Path) -> None:
    """Warns if a run was trained on the folder or file that contains a text."""
    data = weights.run_meta(source).get("config", {}).get("data", {})
    for path in (data.get("path"), *data.get("more_paths", ())):
        if path is None or addresses.is_address(path):
            continue
        if text.resolve().is_relative_to(atomic.expanded(path).resolve()):
            terminal.warn(
                f"warning: {source} was trained on text of {path}, which contains --data {text}: "
                "the result may be that of text it has seen"
            )


def _check_readable(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"--data {path} is a folder: pass a text file")
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"--data {path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def _progress(things: str) -> Iterator[Callable[[int, int], None]]:
    """Shows the progress; yields a function that takes how much is done, and of how much."""
    with contextlib.ExitStack() as stack:
        shown: list[Callable[[int, int], None]] = []

        def each(done: int, count: int) -> None:
            if not shown:  # only now is the count known
                counted = progress_bar.counted("measuring", things, count, 0, terminal.out)
                shown.append(stack.enter_context(counted))
            shown[0](done, 0)

        yield each


def _derived(found: fill_mask.MaskedScore | language_model.TextScore) -> dict[str, float]:
    if isinstance(found, fill_mask.MaskedScore):
        return {"pseudo_perplexity": found.pseudo_perplexity}
    return {"perplexity": found.perplexity}


def _report(
    found: fill_mask.MaskedScore | language_model.TextScore,
    model: MaskedModel | CausalModel,
    flags: commands.Evaluate,
) -> str:
    cut = f" of the first {flags.max_tokens:,} (--max-tokens)" if flags.max_tokens else ""
    head = f"measured on {flags.data}: {found.tokens:,} tokens{cut}, "
    if isinstance(found, fill_mask.MaskedScore):
        head += (
            f"each masked in turn, in a window of up to {model.longest} tokens "
            f"({flags.precision}); excludes {found.unknown:,} unknown tokens"
        )
        rows = [("pseudo-perplexity", found.pseudo_perplexity)]
    else:
        head += (
            f"{found.bytes:,} bytes, each token predicted from the {model.longest // 2} to "
            f"{model.longest} tokens before it, if there are as many ({flags.precision})"
        )
        rows = [("bits per byte", found.bits_per_byte), ("perplexity per token", found.perplexity)]
    rows += [("loss (nats)", found.loss), ("accuracy", found.accuracy)]
    width = max(len(name) for name, _ in rows)
    table = (f"{name:{width}}  {value:.4f}" for name, value in rows)
    return "\n".join((head, model.source, "", *table))
