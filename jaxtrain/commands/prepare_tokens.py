"""``jaxtrain prepare tokens``: a text config's tokenizer, tokens and examples, once.

It does what a run does at its start, before the GPUs are rented: it fetches Hugging Face datasets,
learns a vocabulary, tokenises the text on all cores and, for masked models, packs it into
sequences. A run with the same settings then starts at once. A command that was stopped goes on when
it is given again.
"""

from jaxtrain import config
from jaxtrain.commands import command_line
from jaxtrain.errors import InputError


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
        InputError: wrong use, or data that a run would refuse.
    """
    usage = "jaxtrain prepare tokens --config NAME [--section.field value ...]"
    parser = command_line.parser("prepare tokens", usage, __doc__)
    if not arguments or set(arguments) & {"--help", "-h"}:
        parser.print_help()
        return 0
    flags, overrides = command_line.parse(parser, arguments)
    run = config.load(flags.config, overrides)

    from jaxtrain.data import cache, text

    if not isinstance(run.data, text.Masked | text.Causal):
        raise InputError(f"--config {flags.config} trains on no text: it has no tokens")

    def say(message: str) -> None:
        print(message, flush=True)

    sources = run.data.open(run.model, seed=run.seed, say=say)
    for bad in sources.bad[:5]:
        say(f"left out: {bad}")
    share = len(sources.bad) / max(1, sources.files)
    if share > run.data.max_bad_share:
        raise InputError(
            f"{len(sources.bad)} of {sources.files} input files are broken ({share:.1%}), more "
            f"than data.max_bad_share ({run.data.max_bad_share:.1%}): mend or remove them, or "
            "raise --data.max_bad_share"
        )
    say(sources.summary)
    say(f"ready in {cache.root(run.data.cache_dir)}: train with the same --config and fields")
    return 0
