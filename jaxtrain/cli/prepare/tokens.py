"""``jaxtrain prepare tokens``: prepares the examples of a text config."""

from collections.abc import Callable

from jaxtrain import config, terminal, versions
from jaxtrain.cli import command_line, commands, job_flags
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic


def main(flags: commands.PrepareTokens) -> int:
    """Runs the command and returns its exit code."""
    run = config.load(flags.config, flags.overrides)
    with command_line.resumable("parts"):
        return _prepare(run, flags, terminal.say)


def _prepare(run: config.Run, flags: commands.PrepareTokens, say: Callable[[str], None]) -> int:
    from jaxtrain.data import quarantine, text
    from jaxtrain.interop import hub
    from jaxtrain.storage import cache

    if not isinstance(run.data, text.Masked | text.Causal):
        raise InputError(f"--config {flags.config} does not train on text, so it has no tokens")
    engine, part = job_flags.engine(flags), job_flags.part(flags)
    model = hub.with_local_tokenizer(run.model, say)
    prepared = run.data.prepare(model, say, engine=engine, part=part, uploads=True)
    if prepared is None:
        say(f"{part} is done; the command whose part ends last, or the run, finds the examples")
        return 0
    if complaint := quarantine.too_many(len(prepared.bad), prepared.files, run.data.max_bad_share):
        raise InputError(f"{complaint}: fix or remove them, or raise --data.max_bad_share")
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
        atomic.write_json(flags.json, content)
        say(f"wrote {flags.json}")
    return 1 if sources.bad else 0
