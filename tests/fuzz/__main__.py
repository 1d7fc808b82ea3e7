"""Fuzzes the real commands with valid files mutated by seed.

    python tests/fuzz --cases 10000 --fresh 1500 --seed 1 --jobs 2
    python tests/fuzz --kind safetensors --cases 200
    python tests/fuzz --replay safetensors:1000017 --keep
    python tests/fuzz --listed --cases 300

A case consists of a kind of input and a seed, which determine the valid file, how it is changed,
and the command that reads it. Most cases run in forks of a server that has imported jaxtrain
without starting a jax backend; ``--fresh`` of them run in fresh processes.

Allowed: the command works; it skips the input and reports that; or it prints lines of error and
ends with exit code 2 (`prepare` may report bad inputs with 1). Forbidden: a traceback, another exit
code, a signal, control characters in the output, a file written outside the case's folders, a
program or process that the command does not start for the valid file, a connection, more than
4 GiB of resident memory, or exceeding the deadline.

The harness runs in separate namespaces without a network, so libraries in C cannot reach anything
outside either. A hook in the fuzzed process records forbidden acts of Python code; see fuzzed.py.

Exit codes: 0 all cases passed, 1 some failed, 2 wrong use.
"""

import argparse
import concurrent.futures
import fcntl
import json
import os
import queue
import random
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests")]

# Importable only now.
from fuzz import cases, corpus, isolation, sandbox, verdict  # noqa: E402

LISTED = Path(__file__).parent / "seeds.txt"
_PER_SEED = 1_000_000  # case number n of --seed S has the seed S * this + n
Wanted = tuple[str, int, bool]  # kind, seed, fresh


class Result(NamedTuple):
    kind: str
    outcome: str
    problems: tuple[str, ...]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cases", type=int, default=1000, help="number of cases (default: 1000)")
    add("--fresh", type=int, help="number of cases in fresh processes (default: 15%%)")
    add("--seed", type=int, default=1, help="seed of all cases (default: 1)")
    add(
        "--kind",
        action="append",
        choices=[*cases.KINDS],
        help="run only this kind; may be repeated",
    )
    add("--listed", action="store_true", help="run every seed of tests/fuzz/seeds.txt first")
    add(
        "--replay", action="append", metavar="KIND:SEED", help="run only this case; may be repeated"
    )
    add("--jobs", type=int, default=1, help="parallel cases, one per core (default: 1)")
    add("--work", type=Path, default=Path("output/fuzz"), help="folder for cases and failures")
    add("--keep", action="store_true", help="also keep the folders of cases that passed")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    given = _parse(arguments)
    try:
        wanted = _wanted(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not isolation.inside():
        why = isolation.enter(arguments)
        print(f"note: no separate namespaces ({why}); only the hook detects connections")
    work: Path = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    lock = (work / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"error: another harness uses {work}: pass another --work", file=sys.stderr)
        return 2
    compiled = work / "compiled"
    compiled.mkdir(exist_ok=True)
    variables = {"JAX_COMPILATION_CACHE_DIR": str(compiled), "JAXTRAIN_CACHE": str(work / "cache")}
    valid = corpus.make(work, variables)
    if not (valid / "published.pth").exists():
        print("note: torch is not installed; cases of kind pth are skipped")
        wanted = [one for one in wanted if one[0] != "pth"]
    began = time.monotonic()
    with _Pool(given.jobs, work, compiled, valid, keep=bool(given.keep)) as pool:
        usual_problems = pool.learn({kind for kind, _, _ in wanted})
        if usual_problems:
            print("\n".join(usual_problems))
            print(f"error: {len(usual_problems)} commands fail on valid input", file=sys.stderr)
            return 1
        print(f"valid input: {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        results = pool.run(wanted)
    for kind in sorted({result.kind for result in results}):
        print(kind, summary([result for result in results if result.kind == kind]))
    print(f"all {summary(results)}; {time.monotonic() - began:.0f} s")
    return 1 if any(result.problems for result in results) else 0


def summary(results: Sequence[Result]) -> str:
    """Counts the outcomes of some cases."""
    counts = Counter("FAILED" if one.problems else one.outcome for one in results)
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))


def _wanted(given: argparse.Namespace) -> list[Wanted]:
    """Returns all requested cases, in order.

    Raises:
        ValueError: a replayed case is not a KIND:SEED.
    """
    if given.replay:
        return [(*_parsed(text), bool(given.fresh)) for text in given.replay]
    listed = [line.partition("#")[0].strip() for line in LISTED.read_text().splitlines()]
    found = [(*_parsed(line), False) for line in listed if line and given.listed]
    rng = random.Random(f"cases {given.seed}")
    kinds = given.kind or [*cases.KINDS]
    weights = [cases.KINDS[kind].weight for kind in kinds]
    fresh = round(given.cases * 0.15) if given.fresh is None else given.fresh
    alone = set(rng.sample(range(given.cases), min(fresh, given.cases)))
    for number in range(given.cases):
        (kind,) = rng.choices(kinds, weights)
        found.append((kind, given.seed * _PER_SEED + number, number in alone))
    return found


def _parsed(text: str) -> tuple[str, int]:
    kind, _, seed = text.partition(":")
    if kind not in cases.KINDS or not seed.isdigit():
        raise ValueError(f"{text!r} is not KIND:SEED; kinds are {', '.join(cases.KINDS)}")
    return kind, int(seed)


class _Pool:
    """A pool of sandboxes, each running one case at a time."""

    def __init__(self, jobs: int, work: Path, compiled: Path, valid: Path, *, keep: bool) -> None:
        self._work, self._valid, self._keep = work, valid, keep
        cores = sorted(os.sched_getaffinity(0))
        self._free: queue.Queue[sandbox.Sandbox] = queue.Queue()
        self._all = [
            sandbox.Sandbox(work / f"job-{n}" / "case", compiled, cores[n % len(cores)])
            for n in range(jobs)
        ]
        for one in self._all:
            self._free.put(one)
        self._usual: dict[tuple[str, ...], frozenset[str]] = {}
        self._lock = threading.Lock()
        self._threads = concurrent.futures.ThreadPoolExecutor(jobs)

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for one in self._all:
            one.__exit__()

    def learn(self, kinds: set[str]) -> list[str]:
        """Runs every command on valid input, and records the processes that it starts as usual.

        They are stored with the valid input, which is recreated if the code changes.

        Returns:
            A line for each failure.
        """
        path = self._valid / "usual.json"
        if path.exists():
            known = json.loads(path.read_text())
            self._usual = {tuple(words): frozenset(usual) for words, usual in known}
        todo = cases.unchanged(lambda kind: kind in kinds and (kind != "pth" or self._has_pth()))
        todo = [one for one in todo if one[2].words not in self._usual]
        found = [line for lines in self._threads.map(self._learn, todo) for line in lines]
        if not found:
            known = [[words, sorted(usual)] for words, usual in self._usual.items()]
            path.write_text(json.dumps(known))
        return found

    def _has_pth(self) -> bool:
        return (self._valid / "published.pth").exists()

    def _learn(self, one: tuple[str, cases.Seed, cases.Command]) -> list[str]:
        kind, seed, command = one
        box = self._free.get()
        try:
            folder = box.clear()
            path = cases.place(seed, self._valid, folder)
            arguments = command.arguments(cases.relative(path, folder))
            ended = box.run(arguments, fresh=False, seconds=180)
            events = {event["detail"] for event in ended.events if event["what"] == "starts"}
            usual = frozenset(events | ended.started)
            with self._lock:
                self._usual[command.words] = self._usual.get(command.words, frozenset()) | usual
            found = verdict.problems(ended, arguments, usual=usual, allowed=command.allowed)
            if found:
                self._save(box, f"valid-{kind}-{path.name}", found)
            return [f"{' '.join(arguments)}: {line}" for line in found]
        finally:
            self._free.put(box)

    def run(self, wanted: Sequence[Wanted]) -> list[Result]:
        """Runs cases and prints failures as they occur."""
        results: list[Result] = []

        def run_case(case: Wanted) -> None:
            result = self._run_case(*case)
            with self._lock:
                results.append(result)
                for problem in result.problems:
                    mode = " fresh" if case[2] else ""
                    print(f"FAILED {result.kind}:{case[1]}{mode}: {problem}", flush=True)
                if len(results) % 500 == 0:
                    print(f"{len(results)} of {len(wanted)} cases", flush=True)

        list(self._threads.map(run_case, wanted))
        return results

    def _run_case(self, kind: str, seed: int, fresh: bool) -> Result:
        box = self._free.get()
        try:
            return self._run_and_check(box, kind, seed, fresh=fresh)
        except Exception as error:  # an error of the harness; the other cases continue
            return Result(kind, "harness", (f"harness: {error!r}",))
        finally:
            self._free.put(box)

    def _run_and_check(self, box: sandbox.Sandbox, kind: str, seed: int, *, fresh: bool) -> Result:
        case = cases.make(kind, seed, self._valid, box.clear())
        known = cases.KINDS[kind]
        ended = box.run(case.arguments, fresh=fresh)
        usual = self._usual.get(case.command.words, frozenset())
        found = verdict.problems(ended, case.arguments, usual=usual, allowed=case.command.allowed)
        if not known.bounded:
            found = [one for one in found if not one.startswith(verdict.BOUNDS)]
        if found or self._keep:
            self._save(box, f"{kind}-{seed}", found)
        return Result(kind, verdict.outcome(ended), tuple(found))

    def _save(self, box: sandbox.Sandbox, name: str, problems: list[str]) -> None:
        """Moves a case's folder to the folder of failed cases, with its problems."""
        target = self._work / "failed" / name
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)
        box.folder.rename(target)
        (target / "problems.txt").write_text("".join(f"{line}\n" for line in problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
