"""Prepares the tokenizer, tokens, and examples of a text config, before you rent GPUs.

It does what a run does when it starts: it downloads Hugging Face datasets, trains a
tokenizer, tokenizes the text on all cores, and, for masked models, packs it into
sequences. A run with the same settings then starts at once. To resume after a
stop, repeat the command.
"""

import argparse
import json
from collections.abc import Callable

from jaxtrain import config, terminal, versions
from jaxtrain.cli import command_line, job_flags
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
        InputError: wrong use, or data that a run would refuse.
    """
    usage = "jaxtrain prepare tokens --config NAME [flags] [--section.field VALUE ...]"
    parser = command_line.parser("prepare tokens", usage, __doc__)
    job_flags.add(parser)
    if not arguments or set(arguments) & {"--help", "-h"}:
        parser.print_help()
        return 0
    flags, overrides = command_line.parse(parser, arguments)
    _check_present(flags.config, overrides)
    run = config.load(flags.config, overrides)
    atomic.check_writable("--json", flags.json)
    with command_line.resumable("parts"):
        return _prepare(run, flags, terminal.say)


def _check_present(name: str, overrides: list[str]) -> None:
    """Refuses ``--data.path`` that does not exist before a config imports jax for its model.

    A run checks the same and more, after that.
    """
    from jaxtrain.config import files
    from jaxtrain.data.text import documents, hub_datasets

    files.find(name)
    for value in command_line.values_of("--data.path", overrides):
        if value.startswith("--") or value == "None":
            continue
        if not hub_datasets.is_named(value) and documents.is_absent(value):
            raise InputError(documents.absent("--data.path", value))


def _prepare(run: config.Run, flags: argparse.Namespace, say: Callable[[str], None]) -> int:
    from jaxtrain.data import cache, text
    from jaxtrain.interop import hub

    if not isinstance(run.data, text.Masked | text.Causal):
        raise InputError(f"--config {flags.config} does not train on text, so it has no tokens")
    engine, part = job_flags.engine(flags), job_flags.part(flags)
    model = hub.with_local_tokenizer(run.model, say)
    prepared = run.data.prepare(model, say, engine=engine, part=part, uploads=True)
    if prepared is None:
        say(f"{part} is done; the command whose part ends last, or the run, finds the examples")
        return 0
    sources = run.data.examples(prepared, model, say)
    say(sources.summary)
    if sources.small_training:
        say(sources.small_training)
    root = cache.url(run.data.cache_dir) or str(cache.root(run.data.cache_dir))
    say(f"ready in {root}: train with the same --config and fields")
    if flags.json:
        content = {
            "config": run.name,
            "cache": root,
            "versions": versions.line(),
            "files": sources.files,
            "bad": [{"path": bad.path, "reason": bad.reason} for bad in sources.bad],
            "summary": sources.summary,
            **{
                split: {"examples": len(source), "fingerprint": source.fingerprint}
                for split, source in (("train", sources.train), ("val", sources.val))
            },
        }
        atomic.write_whole(flags.json, json.dumps(content, indent=2) + "\n")
        say(f"wrote {flags.json}")
    return 1 if sources.bad else 0
