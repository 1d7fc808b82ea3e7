"""Pseudo-perplexity of a masked language model on a text.

SOURCE is a checkpoint, a run's directory (its best checkpoint, or else its newest) or a folder of
transformers' BertForMaskedLM. Each token is masked in turn, and the model sees as many tokens
around it as it takes. Unknown words ([UNK]) are left out, as in training. That is one forward pass
a token: --max-tokens N takes the first N only.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain import files, versions
from jaxtrain.commands import command_line
from jaxtrain.data import documents
from jaxtrain.errors import BadExample, InputError
from jaxtrain.masked_text import MaskedModel, Score

_TELL_EVERY_S = 10.0


def main(arguments: list[str]) -> int:
    """Runs the command; :mod:`jaxtrain.commands.evaluate` does where SOURCE is of such a model.

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
    files.check_writable("--json", flags.json)
    _check_readable(flags.data)
    model = MaskedModel(flags.source, flags.precision)
    text = _text(flags.data, model, flags.max_tokens)
    try:
        found = model.score(text, rows=flags.rows, max_tokens=flags.max_tokens, each=_teller())
    except InputError as error:
        raise InputError(f"--data {flags.data}: {error}") from error
    print(_report(found, model, flags))
    if flags.json:
        content = {
            "source": model.source,
            "data": str(flags.data),
            "max_tokens": flags.max_tokens,
            "precision": flags.precision,
            "versions": versions.line(),
            **dataclasses.asdict(found),
            "pseudo_perplexity": found.pseudo_perplexity,
        }
        files.write_whole(flags.json, json.dumps(content, indent=2) + "\n")
        print(f"written to {flags.json}")
    return 0


def _check_readable(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"--data {path} is a folder: name a text file")
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"--data {path} cannot be read: {error.strerror}") from error


def _text(path: Path, model: MaskedModel, max_tokens: int | None) -> str:
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
            print(f"{done:,} of {count:,} tokens", flush=True)

    return tell


def _report(found: Score, model: MaskedModel, flags: argparse.Namespace) -> str:
    cut = f" of the first {flags.max_tokens:,} (--max-tokens)" if flags.max_tokens else ""
    return "\n".join(
        (
            f"measured on {flags.data}: {found.tokens:,} tokens{cut}, each masked in turn, among "
            f"{model.longest} tokens at most ({flags.precision}); {found.unknown:,} unknown words "
            "beside them are not counted",
            f"{model.source}",
            "",
            f"pseudo-perplexity  {found.pseudo_perplexity:.4f}",
            f"loss (nats)        {found.loss:.4f}",
            f"accuracy           {found.accuracy:.4f}",
        )
    )


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain evaluate SOURCE --data FILE.txt [flags]"
    parser = command_line.bare_parser("evaluate", usage, __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", type=command_line.named_file, help="a masked language model")
    add("--data", metavar="FILE", type=command_line.named_file, required=True, help="a text, UTF-8")
    add(
        "--max-tokens",
        metavar="N",
        type=int,
        help="mask only the first N tokens (all), and read no more than these take",
    )
    add("--rows", metavar="N", type=int, default=16, help="masked copies at a time (16)")
    add(
        "--json",
        metavar="FILE",
        type=command_line.named_file,
        help="write all of it there too",
    )
    command_line.add_precision(parser)
    return parser
