"""``jaxtrain completion bash | zsh``: prints a script that completes the command line.

Completes commands, config names, flags, config fields, and run directories. Fields and flags take a
second the first time, because reading them imports jax; the cache folder keeps them.
"""

import contextlib
import hashlib
import importlib
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxtrain import versions
from jaxtrain.cli import COMMANDS
from jaxtrain.config import files
from jaxtrain.errors import InputError

USAGE = """\
usage: jaxtrain completion bash | zsh

Prints a script that completes commands, config names, flags, config fields,
and run directories.
  bash: add to ~/.bashrc    source <(jaxtrain completion bash)
  zsh:  add to ~/.zshrc     source <(jaxtrain completion zsh)"""
# The shell falls back to file names where jaxtrain has no candidates.
SCRIPTS = {
    "bash": """\
_jaxtrain() {
    mapfile -t COMPREPLY < <(jaxtrain completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    # Quotes the names of folders, which may contain $(...).
    [[ ${COMPREPLY[*]} != */* ]] || compopt -o filenames
}
complete -o default -F _jaxtrain jaxtrain
""",
    "zsh": """\
_jaxtrain() {
    local -a found
    found=("${(@f)$(jaxtrain completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    [[ -n ${found[1]} ]] && compadd -a found || _files
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _jaxtrain jaxtrain
""",
}
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")
# Commands that take the config of a run and its fields.
_OF_CONFIG = ("train", "plan", "doctor", "bench", "prepare")
_RUNS = Path("output")
_MOST_RUNS = 200


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
        InputError: wrong use.
    """
    match arguments:
        case [] | ["--help"] | ["-h"]:
            print(USAGE)
        case [("bash" | "zsh") as shell]:
            print(SCRIPTS[shell], end="")
        case ["words", *typed]:
            for candidate in candidates(typed):
                print(candidate)
        case [other, *_]:
            raise InputError(f"completion {other}: the shells are bash and zsh")
    return 0


def candidates(typed: Sequence[str]) -> list[str]:
    """Returns what the last word can become, sorted.

    Args:
        typed: the words after ``jaxtrain``; the last one is being typed and may be empty.
    """
    *before, word = typed or [""]
    found: Sequence[str]
    names = ("train", "help", "version", *COMMANDS)
    if not before:
        found = _run_flags() if word.startswith("-") else [*names, *files.names()]
    elif before[-1] == "--config" or (len(before) == 1 and before[0] == "train"):
        found = _config_flags(before) if word.startswith("-") else files.names()
    elif before == ["help"]:
        found = names
    elif word.startswith("-"):
        found = _flags_of(before)
    elif before[-1] == "--track":
        from jaxtrain.telemetry.tracker import TRACKERS

        found = TRACKERS
    elif before[-1].startswith("--") and before[-1] not in ("--output-dir", "--resume"):
        found = []
    else:
        found = [*(["latest"] if before[-1] == "--resume" else []), *_runs(), *_actions(before)]
    # A folder below output/ may have any name; a terminal obeys control characters.
    return sorted({one for one in found if one.startswith(word) and one.isprintable()})


def _actions(before: Sequence[str]) -> Sequence[str]:
    known = {
        "configs": ("list", "show", "diff"),
        "prepare": ("clips", "tokens", "latents"),
        "completion": ("bash", "zsh"),
    }
    if len(before) == 2 and before[0] == "configs":
        return files.names()
    return known.get(before[0], ()) if len(before) == 1 else ()


def _runs() -> list[str]:
    """Run directories below ``output``, as one types them."""
    found = [_RUNS / "latest", *sorted(_RUNS.glob("*/*/config.json"))[:_MOST_RUNS]]
    found += sorted(_RUNS.glob("*/config.json"))[:_MOST_RUNS]
    return [
        str(path.parent if path.name == "config.json" else path) for path in found if path.exists()
    ]


def _run_flags() -> list[str]:
    from jaxtrain.cli import train

    return [flag for one in train.flags_parser()._actions for flag in one.option_strings[:1]]


def _flags_of(before: Sequence[str]) -> Sequence[str]:
    command = before[0]
    own: Sequence[str] = _run_flags()
    if not command.startswith("-") and command != "train":
        words = before[:2] if command == "prepare" else before[:1]
        own = _kept(f"flags of {' '.join(words)}", lambda: _flags_in_help(words))
    takes_config = command.startswith("-") or command in _OF_CONFIG
    return [*own, *_config_flags(before)] if takes_config else own


def _flags_in_help(words: Sequence[str]) -> list[str]:
    if words[0] not in COMMANDS:
        return []
    module = importlib.import_module(f"jaxtrain.cli.{words[0].replace('-', '_')}")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(InputError, SystemExit):
        module.main([*words[1:], "--help"])
    return sorted(set(_FLAG.findall(output.getvalue())))


def _config_flags(before: Sequence[str]) -> list[str]:
    """The fields of the config that was typed, as flags."""
    named = before[1] if before[0] == "train" and len(before) > 1 else None
    for flag, value in itertools.pairwise(before):
        named = value if flag == "--config" else named
    if named is None:
        return _run_flags()
    try:
        text = files.find(named).read_text(encoding="utf-8")
    except (InputError, OSError, UnicodeDecodeError):
        return _run_flags()
    return [*_run_flags(), *_kept(f"fields of {named} {text}", lambda: _fields(named))]


def _fields(name: str) -> list[str]:
    from jaxtrain import config
    from jaxtrain.config import help as config_help

    run = config.named(name)
    sections = config_help.sections(run)
    return sorted(
        f"--{field.name}" for section in sections for field in config_help.described(section)
    )


def _kept(key: str, make: Callable[[], list[str]]) -> list[str]:
    """What ``make`` returned the last time, from the cache folder; for this version of jaxtrain."""
    from jaxtrain.data import cache
    from jaxtrain.storage import atomic

    digest = hashlib.sha256(f"{versions.line()} {key}".encode()).hexdigest()[:24]
    with contextlib.suppress(OSError, InputError, ValueError):
        path = cache.root(None) / "completion" / f"{digest}.json"
        if path.is_file():
            stored = json.loads(path.read_text())
            if isinstance(stored, list) and all(isinstance(one, str) for one in stored):
                return stored
        found = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_whole(path, json.dumps(found))
        return found
    return make()
