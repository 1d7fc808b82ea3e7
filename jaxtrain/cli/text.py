"""``jaxtrain generate``, ``fill``, and ``evaluate`` of a language model."""

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain import errors, formats, terminal, versions
from jaxtrain.checkpoint import resume
from jaxtrain.cli import commands
from jaxtrain.errors import InputError
from jaxtrain.inference.evaluation import blimp, language_models
from jaxtrain.inference.evaluation.blimp import BlimpScore
from jaxtrain.inference.evaluation.core_tasks import CoreScore
from jaxtrain.inference.fill_mask import MaskedModel, MaskedScore
from jaxtrain.inference.language_model import CausalModel, TextScore
from jaxtrain.interop import hub, weights
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


def evaluate(
    flags: commands.Evaluate, source: Path, kind: type[MaskedModel] | type[CausalModel]
) -> int:
    """Runs the command; the command does if SOURCE is a language model."""
    data = atomic.expanded(flags.data)
    measurement = language_models.measurement(
        kind,
        data,
        text_field=flags.text_field,
        max_tokens=flags.max_tokens,
        max_examples=flags.max_examples,
    )
    _warn_of_training_text(source, data)
    model = kind(source, flags.precision, command="evaluate")
    with _progress(measurement.unit) as each:
        score = measurement.score(model, flags.rows or language_models.ROWS, each)
    content = {"max_examples": flags.max_examples, **dataclasses.asdict(score)}
    match score:
        case CoreScore():
            terminal.out(_core_report(score, model, data, flags))
        case BlimpScore():
            terminal.out(_blimp_report(score, model, data, flags))
        case _:
            terminal.out(_text_report(score, model, data, flags))
            content = {"max_tokens": flags.max_tokens, **dataclasses.asdict(score)}
            content |= _derived(score)
    if flags.json:
        provenance = {"precision": flags.precision, "versions": versions.line()}
        report = {"source": model.source, "data": str(data), **provenance, **content}
        atomic.write_json(flags.json, report)
        terminal.out(f"wrote {flags.json}")
    return 0


def _core_report(
    score: CoreScore, model: MaskedModel | CausalModel, data: Path, flags: commands.Evaluate
) -> str:
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
    return f"{head} ({flags.precision})\n{model.source}\n\n{formats.columns(table, {0, 1})}"


def _blimp_report(
    score: BlimpScore, model: MaskedModel | CausalModel, data: Path, flags: commands.Evaluate
) -> str:
    by = "probability" if isinstance(model, CausalModel) else "pseudo-log-likelihood"
    return (
        f"measured on {data}: pairs whose acceptable sentence has the higher {by} "
        f"({flags.precision})\n{model.source}\n\n{formats.columns(list(blimp.rows_of(score)), {0})}"
        f"\n\npublished, on all 67 paradigms of 1,000 pairs: {blimp.SOURCE}"
    )


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


def _derived(score: MaskedScore | TextScore) -> dict[str, float]:
    if isinstance(score, MaskedScore):
        return {"pseudo_perplexity": score.pseudo_perplexity}
    return {"perplexity": score.perplexity}


def _text_report(
    score: MaskedScore | TextScore,
    model: MaskedModel | CausalModel,
    data: Path,
    flags: commands.Evaluate,
) -> str:
    cut = f" of the first {flags.max_tokens:,} (--max-tokens)" if flags.max_tokens else ""
    head = f"measured on {data}: {score.tokens:,} tokens{cut}, "
    if isinstance(score, MaskedScore):
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
