"""``jaxtrain generate``, ``fill``, and ``evaluate`` of a language model."""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxtrain import errors, formats, terminal, versions
from jaxtrain.checkpoint import resume
from jaxtrain.cli import commands
from jaxtrain.data.text import documents
from jaxtrain.errors import BadExample, InputError
from jaxtrain.inference import fill_mask, language_model
from jaxtrain.inference.evaluation import blimp, core_tasks
from jaxtrain.inference.fill_mask import MaskedModel
from jaxtrain.inference.language_model import CausalModel
from jaxtrain.interop import hub, weights
from jaxtrain.models.contract import Task
from jaxtrain.ops.sampling import Choice
from jaxtrain.storage import addresses, atomic
from jaxtrain.storage.atomic import LATEST, expanded
from jaxtrain.training import run_directory


def main(flags: commands.Generate | commands.Fill) -> int:
    """Runs the command."""
    return generate(flags) if isinstance(flags, commands.Generate) else fill(flags)


_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def generate(flags: commands.Generate) -> int:
    """Runs the command."""
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
    """Returns ``output/latest`` if its model can generate text, else the newest such run."""
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


def fill(flags: commands.Fill) -> int:
    """Runs the command."""
    filled = MaskedModel(hub.local(flags.source), flags.precision).fill(flags.text, flags.top)
    for number, guesses in enumerate(filled, 1):
        if len(filled) > 1:
            terminal.out(f"mask {number}")
        for guess in guesses:
            terminal.out(f"{guess.probability:8.4f}  {guess.token}")
    return 0


KINDS: dict[Task, type[MaskedModel] | type[CausalModel]] = {
    "fill": MaskedModel,
    "generate": CausalModel,
}
"""A model's task, and the class that uses it."""

_ROWS = 16


def evaluate(
    flags: commands.Evaluate, source: Path, kind: type[MaskedModel] | type[CausalModel]
) -> int:
    """Runs the command; the command does if SOURCE is a language model."""
    data, rows = atomic.expanded(flags.data), flags.rows or _ROWS
    atomic.check_writable("--json", flags.json)
    if kind is CausalModel and core_tasks.is_core(data):
        return _evaluate_core(flags, source, data, rows)
    if blimp.is_blimp(data):
        return _evaluate_blimp(flags, source, kind, data, rows)
    if flags.max_examples is not None:
        raise InputError(
            f"--max-examples {flags.max_examples}: --data {data} is not a folder with the tasks of "
            "CORE or the pairs of BLiMP; omit the flag, or use --max-tokens"
        )
    core = "" if kind is MaskedModel else f" with {core_tasks.TASKS}, or"
    _check_readable(data, f", or a folder{core} with BLiMP's .jsonl files")
    _warn_of_training_text(source, data)
    model = kind(source, flags.precision, command="evaluate")
    max_tokens = None if flags.max_tokens is None else flags.max_tokens + 2 * model.longest
    try:
        texts = documents.texts(data, flags.text_field, model.count, max_tokens)
    except BadExample as error:
        raise InputError(f"--data {flags.data}: {error.reason}") from error
    except OSError as error:
        raise InputError(f"--data {flags.data} cannot be read: {error.strerror}") from error
    try:
        with _progress("windows" if kind is CausalModel else "tokens") as each:
            score = model.score(texts, rows=rows, max_tokens=flags.max_tokens, each=each)
    except InputError as error:
        raise InputError(f"--data {flags.data}: {error}") from error
    terminal.out(_report(score, model, flags))
    content = {"max_tokens": flags.max_tokens, **dataclasses.asdict(score), **_derived(score)}
    _write_json(flags, model.source, data, content)
    return 0


def _evaluate_core(flags: commands.Evaluate, source: Path, data: Path, rows: int) -> int:
    _refuse_text_flags(flags, f"--data {data} has the tasks of CORE")
    tasks = core_tasks.read(data, flags.max_examples)  # before the model, which takes longer
    model = CausalModel(source, flags.precision, command="evaluate")
    with _progress("examples") as each:
        score = core_tasks.score(model, tasks, rows, each)
    table: list[tuple[str, ...]] = [
        ("task", "kind", "shots", "examples", "accuracy", "baseline", "centered")
    ]
    for task in score.tasks:
        shares = (f"{value:.4f}" for value in (task.accuracy, task.baseline, task.centered))
        table.append((task.label, task.kind, str(task.shots), f"{task.examples:,}", *shares))
    table.append(("CORE", "", "", "", "", "", f"{score.core:.4f}"))
    count = sum(task.examples for task in score.tasks)
    limit = "" if flags.max_examples is None else f", {flags.max_examples:,} per task at most"
    head = f"measured on {data}: {count:,} examples{limit}"
    if score.cut:
        head += f"; {score.cut:,} prompts without their beginning, beyond {model.longest} tokens"
    terminal.out(f"{head} ({flags.precision})\n{model.source}\n")
    terminal.out(formats.columns(table, {0, 1}))
    content = {"max_examples": flags.max_examples, **dataclasses.asdict(score)}
    _write_json(flags, model.source, data, content)
    return 0


def _evaluate_blimp(
    flags: commands.Evaluate,
    source: Path,
    kind: type[MaskedModel] | type[CausalModel],
    data: Path,
    rows: int,
) -> int:
    _refuse_text_flags(flags, f"--data {data} has the pairs of BLiMP")
    paradigms = blimp.read(data, flags.max_examples)  # before the model, which takes longer
    model = kind(source, flags.precision, command="evaluate")
    with _progress("pairs") as each:
        score = blimp.score(model, paradigms, rows, each)
    by = "probability" if kind is CausalModel else "pseudo-log-likelihood"
    terminal.out(
        f"measured on {data}: pairs whose acceptable sentence has the higher {by} "
        f"({flags.precision})\n{model.source}\n\n{formats.columns(list(blimp.rows_of(score)), {0})}"
        f"\n\npublished, on all 67 paradigms of 1,000 pairs: {blimp.SOURCE}"
    )
    content = {"max_examples": flags.max_examples, **dataclasses.asdict(score)}
    _write_json(flags, model.source, data, content)
    return 0


def _refuse_text_flags(flags: commands.Evaluate, reason: str) -> None:
    for name, value in (("text-field", flags.text_field), ("max-tokens", flags.max_tokens)):
        if value is not None:
            raise InputError(f"--{name} {value}: {reason}; omit the flag")


def _write_json(flags: commands.Evaluate, source: str, data: Path, content: dict[str, Any]) -> None:
    if flags.json:
        provenance = {"precision": flags.precision, "versions": versions.line()}
        report = {"source": source, "data": str(data), **provenance, **content}
        atomic.write_whole(flags.json, json.dumps(report, indent=2) + "\n")
        terminal.out(f"wrote {flags.json}")


def _warn_of_training_text(source: Path, text: Path) -> None:
    data = weights.run_meta(source).get("config", {}).get("data", {})
    for path in (data.get("path"), *data.get("more_paths", ())):
        if path is None or addresses.is_address(path):
            continue
        if text.resolve().is_relative_to(atomic.expanded(path).resolve()):
            terminal.warn(
                f"warning: {source} was trained on text of {path}, which contains --data {text}: "
                "the result may be that of text it has seen"
            )


def _check_readable(path: Path, more: str) -> None:
    if path.is_dir():
        raise InputError(f"--data {path} is a folder: pass a text file{more}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"--data {path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def _progress(things: str) -> Iterator[Callable[[int, int], None]]:
    with contextlib.ExitStack() as stack:
        bars: list[Callable[[int, int], None]] = []

        def each(done: int, count: int) -> None:
            if not bars:  # only now is the count known
                counted = terminal.progress_bar("measuring", things, count, 0, terminal.out)
                bars.append(stack.enter_context(counted))
            bars[0](done, 0)

        yield each


def _derived(score: fill_mask.MaskedScore | language_model.TextScore) -> dict[str, float]:
    if isinstance(score, fill_mask.MaskedScore):
        return {"pseudo_perplexity": score.pseudo_perplexity}
    return {"perplexity": score.perplexity}


def _report(
    score: fill_mask.MaskedScore | language_model.TextScore,
    model: MaskedModel | CausalModel,
    flags: commands.Evaluate,
) -> str:
    cut = f" of the first {flags.max_tokens:,} (--max-tokens)" if flags.max_tokens else ""
    head = f"measured on {flags.data}: {score.tokens:,} tokens{cut}, "
    if isinstance(score, fill_mask.MaskedScore):
        head += (
            f"one masked at a time, in a window of up to {model.longest} tokens "
            f"({flags.precision}); excludes {score.unknown:,} unknown tokens; the tokenizer loses "
            f"{100 * score.lost:.2f}% of the characters"
        )
        rows = [("pseudo-perplexity", score.pseudo_perplexity)]
    else:
        head += (
            f"{score.bytes:,} bytes, each token predicted from the {model.longest // 2} to "
            f"{model.longest} tokens before it, if there are as many ({flags.precision})"
        )
        rows = [("bits per byte", score.bits_per_byte), ("perplexity per token", score.perplexity)]
    rows += [("loss (nats)", score.loss), ("accuracy", score.accuracy)]
    width = max(len(name) for name, _ in rows)
    table = (f"{name:{width}}  {value:.4f}" for name, value in rows)
    return "\n".join((head, model.source, "", *table))
