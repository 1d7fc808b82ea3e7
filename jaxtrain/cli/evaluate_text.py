"""How well a language model knows a text.

SOURCE is a checkpoint, a run's directory (its best checkpoint, or else its newest) or a folder of
transformers. A masked language model gives pseudo-perplexity: each token is masked in turn, and the
model sees as many tokens around it as it takes; unknown words ([UNK]) are left out, as in training;
that is one forward pass a token. A causal one gives bits per byte: each token is foretold from
those before it, of which it sees half of what it takes at least. --max-tokens N takes the first N.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain import terminal, versions
from jaxtrain.cli import command_line
from jaxtrain.data.text import documents
from jaxtrain.errors import BadExample, InputError
from jaxtrain.inference import fill_mask, language_model
from jaxtrain.inference.fill_mask import MaskedModel
from jaxtrain.inference.language_model import CausalModel
from jaxtrain.storage import atomic

_TELL_EVERY_S = 10.0


def main(arguments: list[str], kind: type[MaskedModel] | type[CausalModel]) -> int:
    """Runs the command; :mod:`jaxtrain.cli.evaluate` does where SOURCE is of such a model.

    Args:
        arguments: of the command line.
        kind: of model.

    Raises:
        InputError: wrong use, or nothing that can be measured.
    """
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    for name in ("rows", "max_tokens"):
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} {value}: use at least 1")
    atomic.check_writable("--json", flags.json)
    _check_readable(flags.data)
    model = kind(flags.source, flags.precision, command="evaluate")
    text = _text(flags.data, model, flags.max_tokens)
    try:
        found = model.score(text, rows=flags.rows, max_tokens=flags.max_tokens, each=_teller())
    except InputError as error:
        raise InputError(f"--data {flags.data}: {error}") from error
    terminal.out(_report(found, model, flags))
    if flags.json:
        content = {
            "source": model.source,
            "data": str(flags.data),
            "max_tokens": flags.max_tokens,
            "precision": flags.precision,
            "versions": versions.line(),
            **dataclasses.asdict(found),
            **_derived(found),
        }
        atomic.write_whole(flags.json, json.dumps(content, indent=2) + "\n")
        terminal.out(f"written to {flags.json}")
    return 0


def _check_readable(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"--data {path} is a folder: name a text file")
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"--data {path} cannot be read: {error.strerror}") from error


def _text(path: Path, model: MaskedModel | CausalModel, max_tokens: int | None) -> str:
    """The text; of a long one as much as its first tokens take, with those around them."""
    chunks, tokens = [], 0
    try:
        for chunk in documents.decoded(path):
            chunks.append(chunk)
            if max_tokens is not None:
                tokens += model.count(chunk)
                if tokens >= max_tokens + 2 * model.longest:
                    break
    except BadExample as error:
        raise InputError(f"--data {path}: {error.reason}") from error
    except OSError as error:
        raise InputError(f"--data {path} cannot be read: {error.strerror}") from error
    return "".join(chunks)


def _teller() -> Callable[[int, int], None]:
    """Says every ten seconds how far it has come."""
    told = time.monotonic()

    def tell(done: int, count: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= _TELL_EVERY_S:
            told = now
            terminal.out(f"{done / count:.0%} measured")

    return tell


def _derived(found: fill_mask.MaskedScore | language_model.TextScore) -> dict[str, float]:
    if isinstance(found, fill_mask.MaskedScore):
        return {"pseudo_perplexity": found.pseudo_perplexity}
    return {"perplexity": found.perplexity}


def _report(
    found: fill_mask.MaskedScore | language_model.TextScore,
    model: MaskedModel | CausalModel,
    flags: argparse.Namespace,
) -> str:
    cut = f" of the first {flags.max_tokens:,} (--max-tokens)" if flags.max_tokens else ""
    head = f"measured on {flags.data}: {found.tokens:,} tokens{cut}, "
    if isinstance(found, fill_mask.MaskedScore):
        head += (
            f"each masked in turn, among {model.longest} tokens at most ({flags.precision}); "
            f"{found.unknown:,} unknown words beside them are not counted"
        )
        rows = [("pseudo-perplexity", found.pseudo_perplexity)]
    else:
        head += (
            f"{found.bytes:,} bytes, each token foretold from the {model.longest // 2} to "
            f"{model.longest} before it, where there are as many ({flags.precision})"
        )
        rows = [("bits per byte", found.bits_per_byte), ("perplexity of a token", found.perplexity)]
    rows += [("loss (nats)", found.loss), ("accuracy", found.accuracy)]
    width = max(len(name) for name, _ in rows)
    table = (f"{name:{width}}  {value:.4f}" for name, value in rows)
    return "\n".join((head, model.source, "", *table))


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain evaluate SOURCE --data FILE.txt [flags]"
    parser = command_line.bare_parser("evaluate", usage, __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", type=command_line.named_file, help="a language model")
    add("--data", metavar="FILE", type=command_line.named_file, required=True, help="a text, UTF-8")
    add(
        "--max-tokens",
        metavar="N",
        type=int,
        help="measure only the first N tokens (all), and read no more than these take",
    )
    add("--rows", metavar="N", type=int, default=16, help="rows of tokens at a time (16)")
    add(
        "--json",
        metavar="FILE",
        type=command_line.named_file,
        help="write all of it there too",
    )
    command_line.add_precision(parser)
    return parser
