"""Injects seeded faults into real runs, and reports lost and repeated work.

    python tests/chaos --faults 100 --processes 1 2 --seed 7
    python tests/chaos --replay 7003 --processes 2
    python tests/chaos --fault kill-all@save --fault term-one@evaluation:1 --processes 2
    python tests/chaos --listed --faults 20

Exit codes: 0 all runs passed, 1 some failed, 2 wrong use, or this machine does not permit the
isolation.
"""

import argparse
import contextlib
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

# Importable only now.
from chaos import isolation  # noqa: E402
from chaos.faults import Fault, Plan, plan  # noqa: E402
from chaos.ordeal import Ordeal  # noqa: E402
from chaos.undisturbed import prepare, undisturbed  # noqa: E402
from storage.bucket_server import FaultProxy, Server  # noqa: E402

Result = dict[str, Any]
BAD_REQUESTS = 0.03  # fraction of a run's requests to the bucket
LISTED = Path(__file__).parent / "seeds.txt"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tests/chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--faults", type=int, default=100, help="number of faults to inject (default: 100)")
    add(
        "--processes",
        type=int,
        nargs="+",
        default=[1, 2],
        help="process counts, used in turn (default: 1 2)",
    )
    add(
        "--against",
        type=int,
        help="process count of the undisturbed run (default: the same)",
    )
    add("--seed", type=int, default=7, help="run n has the seed SEED * 1000 + n (default: 7)")
    add(
        "--work",
        type=Path,
        default=Path("output/chaos"),
        help="folder for runs and caches",
    )
    add("--listed", action="store_true", help="run every line of tests/chaos/seeds.txt first")
    add("--replay", type=int, nargs="+", metavar="SEED", help="run only these seeds")
    add(
        "--fault",
        action="append",
        metavar="KIND@MOMENT[:PROCESS]",
        help="inject exactly these faults; may be repeated",
    )
    add("--workers", type=int, default=0, help="data workers with --fault (default: 0)")
    add(
        "--bucket",
        action="store_true",
        help="keep runs in a bucket (moto's server, with faults), each process on its own disk",
    )
    return parser.parse_args(arguments)


def _plans(given: argparse.Namespace) -> list[Plan]:
    """Returns all requested runs, in order."""
    if given.fault:
        faults = tuple(Fault.parse(text) for text in given.fault)
        return [Plan(0, count, given.workers, faults) for count in given.processes]
    if given.replay:
        return [plan(seed, count) for seed in given.replay for count in given.processes]
    return [
        plan(given.seed * 1000 + number, given.processes[number % len(given.processes)])
        for number in range(1000)
    ]


def _listed() -> list[Plan]:
    """Returns the runs of ``seeds.txt``; a run with named faults has its line number as seed.

    Raises:
        ValueError: a line does not describe a run.
    """
    found = []
    for number, line in enumerate(LISTED.read_text().splitlines(), start=1):
        processes, *words = line.partition("#")[0].split() or [""]
        if not processes:
            continue
        if not processes.isdigit() or not words:
            raise ValueError(
                f"{LISTED.name}:{number}: expected PROCESSES SEED or PROCESSES FAULT..."
            )
        if words[0].isdigit():
            found.append(plan(int(words[0]), int(processes)))
        else:
            faults = tuple(Fault.parse(word) for word in words)
            found.append(Plan(number, int(processes), 0, faults))
    return found


def _flags(wanted: Plan) -> str:
    """Returns the flags that repeat a run."""
    if wanted == plan(wanted.seed, wanted.processes):
        return f"--replay {wanted.seed} --processes {wanted.processes}"
    faults = " ".join(
        f"--fault {fault.kind}@{fault.moment}:{fault.target}" for fault in wanted.faults
    )
    return f"{faults} --processes {wanted.processes} --workers {wanted.workers}"


def _execute(
    wanted: Plan, given: argparse.Namespace, work: Path, server: Server | None = None
) -> Result:
    """Executes one run; keeps its folder if it failed."""
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(work / "compiled")
    variables = {"JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PLATFORMS": "cpu"}
    reference = undisturbed(work, given.against or wanted.processes, variables)
    place = work / "runs" / f"{wanted.seed}-{wanted.processes}"
    shutil.rmtree(place, ignore_errors=True)
    prepare(work, place)
    with faulty(server, wanted.seed) as more:
        outcome = Ordeal(wanted, place, reference, variables | more, server).run()
    result = outcome.to_json(reference.seconds)
    if not result["problems"]:
        shutil.rmtree(place)
    return result


@contextlib.contextmanager
def faulty(server: Server | None, seed: int) -> Iterator[dict[str, str]]:
    """Yields the environment of a run that reaches the bucket through a connection with faults."""
    if server is None:
        yield {}
        return
    rng = random.Random(seed)
    with FaultProxy(server.port) as proxy:
        proxy.fault = lambda method, path: (
            rng.choice(("SlowDown", "InternalError", "cut", "slow", "ExpiredToken"))
            if rng.random() < BAD_REQUESTS
            else ""
        )
        yield proxy.variables


def _print(result: Result, wanted: Plan, in_bucket: bool) -> None:
    for fault in result["faults"]:
        recovered = (
            "at the end" if fault["recovered_s"] is None else f"after {fault['recovered_s']} s"
        )
        where = f"{fault['kind']} in {fault['phase']}, step {fault['step']}"
        print(f"    {where}: {fault['done']}; recovered {recovered}")
    verdict = "failed" if result["problems"] else "passed"
    print(
        f"{verdict}: seed {wanted.seed}, {wanted.processes} processes, {wanted.workers} workers, "
        f"{len(result['faults'])} of {result['planned']} faults struck, {result['starts']} starts, "
        f"{result['seconds']} s"
    )
    for problem in result["problems"]:
        print(f"  - {problem}")
    if result["problems"]:
        kind = "--bucket " if in_bucket else ""
        print(f"  repeat: python tests/chaos {kind}{_flags(wanted)}")
    sys.stdout.flush()


def summary(results: list[Result]) -> str:
    """Summarizes the results in one sentence."""
    faults = sum(len(result["faults"]) for result in results)
    failed = sum(bool(result["problems"]) for result in results)
    manual = sum(needs_hand(result) for result in results)

    def total(key: str) -> float:
        return sum(result[key] for result in results)

    restarts, again = total("starts") - len(results), total("launches") - len(results)
    return (
        f"{faults} faults in {len(results)} runs: {total('lost')} examples lost, "
        f"{total('repeated')} repeated, {manual} manual steps, {failed} failed runs; "
        f"{restarts} restarts, {again} of them after a fault ended the launcher; "
        f"{total('lost_s'):.0f} s lost in {total('seconds'):.0f} s"
    )


def needs_hand(result: Result) -> bool:
    """Whether a run needed more than its launcher to reach its end."""
    return any("manual step" in problem or "stuck" in problem for problem in result["problems"])


def main(arguments: list[str]) -> int:
    given = _parse(arguments)
    try:
        plans = _plans(given)
        listed = _listed() if given.listed else []
        if not isolation.inside():
            isolation.enter(arguments)
    except (ValueError, isolation.Unavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    work: Path = given.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(work / "moto.log")) if given.bucket else None
        for wanted in listed:
            results.append(_execute(wanted, given, work, server))
            _print(results[-1], wanted, given.bucket)
        for wanted in plans:
            struck = sum(len(result["faults"]) for result in results)
            if not (given.fault or given.replay) and struck >= given.faults:
                break
            results.append(_execute(wanted, given, work, server))
            _print(results[-1], wanted, given.bucket)
    print(summary(results))
    return 1 if any(result["problems"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
