"""Answers the questions of a study with `jaxtrain compare`, and keeps the answers.

    python benchmarks/study.py language --folder output/study --data.path BOOKS --data.val_path BOOK

``benchmarks/studies/NAME/questions.toml`` has the questions: what is asked, side a, and side b or
the change, as `compare` takes them. After each, the answer is written to ``answers.json`` beside
it, with the command; a question with an answer is not asked again. To continue after a stop,
repeat the command: all comparisons share the runs in ``FOLDER/runs``. Programs that run beside each
other must ask different questions (``--only``). One whose next run the other is training tries a
few times, and then ends: repeat its command, too.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from jaxtrain.comparison.experiment import VERDICTS
from jaxtrain.storage.atomic import write_whole

STUDIES = Path(__file__).resolve().parent / "studies"
ANSWERS = "answers.json"


def main() -> int:
    """Asks each open question."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "name", choices=sorted(path.parent.name for path in STUDIES.glob("*/*.toml"))
    )
    parser.add_argument("--folder", type=Path, required=True, help="of runs and reports")
    parser.add_argument("--only", default="", help="questions that contain this text")
    flags, fields = parser.parse_known_args()
    typed = tuple(fields)
    for number, field in enumerate(fields):  # `compare` runs in the study's folder
        if os.path.exists(path := os.path.expanduser(field)):
            fields[number] = os.path.abspath(path)
    # Ctrl-C is for `compare`, which stops its runs, so that they resume later.
    signal.signal(signal.SIGINT, lambda *_: None)
    study = STUDIES / flags.name
    questions = tomllib.loads((study / "questions.toml").read_text())
    for name, question in questions.items():
        if name in _answers(study) or flags.only not in name:
            continue
        command = _command(question)
        print(f"\n{name}: {shlex.join(command)}", flush=True)
        folder = flags.folder.absolute() / re.sub(r"\W+", "-", name)
        places = ["--runs", str(folder.parent / "runs"), "--output-dir", str(folder)]
        ran = subprocess.run(
            [sys.executable, "-m", "jaxtrain.main", *command, *fields, *places],
            cwd=study,
            check=False,
        )
        if ran.returncode not in VERDICTS.values():
            return ran.returncode
        found = json.loads((folder / "compare.json").read_text())
        found |= found["answers"][0]
        answer = _answer(recorded([*command, *typed], len(found["pairs"])), found)
        answer["at"] = question.get("at", "steps")
        answers = _answers(study) | {name: answer}  # read again: another study.py may run beside
        text = json.dumps(in_order(answers, questions), indent=1)
        write_whole(study / ANSWERS, f"{text}\n".encode())
    return 0


def in_order(answers: dict[str, Any], questions: dict[str, Any]) -> dict[str, Any]:
    """Returns the answers in the order of the questions, then those that are not asked any more."""
    return {name: answers[name] for name in questions if name in answers} | answers


def _answers(study: Path) -> dict[str, Any]:
    path = study / ANSWERS
    return json.loads(path.read_text()) if path.exists() else {}


def _command(question: dict[str, Any]) -> list[str]:
    sides = [question["a"], *([question["b"]] if "b" in question else [])]
    changes = ["--change", question["change"]] if "change" in question else []
    return [
        "compare",
        *sides,
        *changes,
        "--at",
        question.get("at", "steps"),
        *question.get("flags", []),
    ]


def recorded(command: list[str], pairs: int) -> str:
    """Returns a command as the record has it: with the pairs that were run, and no local paths.

    A path is replaced by the last word of its flag, as in ``--data.val_path VAL_PATH``.
    """
    words = list(command)
    if "--pairs" in words:
        place = words.index("--pairs")
        del words[place : place + 2]
    for number, word in enumerate(words):
        flag = words[number - 1]
        if flag.startswith("--") and os.path.exists(os.path.expanduser(word)):
            words[number] = flag.lstrip("-").rpartition(".")[2].upper()
    return shlex.join([*words, "--pairs", str(pairs)])


def _answer(command: str, found: dict[str, Any]) -> dict[str, Any]:
    """Returns what a reader needs of a ``compare.json``."""
    commit = ["git", "-C", str(STUDIES), "rev-parse", "--short=8", "HEAD"]
    kept = (
        "when",
        "verdict",
        "warnings",
        "metric",
        "better",
        "difference",
        "steps",
        "seconds",
        "pairs_needed",
    )
    return {
        "command": f"jaxtrain {command}",
        "commit": subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip(),
        "cores": os.cpu_count(),
        **{name: found[name] for name in kept},
        "pairs": [{name: pair[name] for name in ("seed", "a", "b")} for pair in found["pairs"]],
    }


if __name__ == "__main__":
    raise SystemExit(main())
