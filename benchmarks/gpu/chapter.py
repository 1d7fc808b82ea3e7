"""The frame of a chapter: its flags, its time, its rows, and what it leaves for the next one."""

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common_start
import results
import run_all

HERE = Path(__file__).resolve().parent
_LEAST_S = 20.0  # begin nothing with less time left
# In a process of its own, so that another checkout or another Python can be measured.
_FINDINGS = """
import json, sys
from jaxtrain.bench import request
print("\\n" + json.dumps(request.findings(**json.loads(sys.argv[1]))))
"""
AUTOTUNE = "xla_gpu_per_fusion_autotune_cache_dir"  # jax's name, in its compilation cache


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the flags of a chapter say.

    Attributes:
        folder: for rows, findings, and what is kept.
        work: for runs and caches.
        minutes: time limit.
        tiny: whether to run tiny sizes on a CPU.
        only: a word; measurements without it in their name are skipped.
        kept: compiled programs of an earlier chapter.
        keep_mib: size limit of what is kept.
    """

    folder: Path
    work: Path | None
    minutes: float
    tiny: bool
    only: str
    kept: Path | None
    keep_mib: float


def flags(text: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the flags of all chapters; a chapter may add others."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    output = common_start.CHECKOUT / "output" / "gpu"
    parser.add_argument("--folder", type=Path, default=output, help="results (default: output/gpu)")
    parser.add_argument("--work", type=Path, help="caches (default: work/ in --folder)")
    parser.add_argument("--minutes", type=float, default=6.0, help="time limit (default: 6)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--only", default="", metavar="WORD", help="only what has WORD in its name")
    parser.add_argument(
        "--kept", type=Path, help="compiled.tar of an earlier chapter (default: that of --folder)"
    )
    parser.add_argument(
        "--keep-mib", type=float, default=15.0, help="size limit of compiled.tar (default: 15)"
    )
    return parser


class Chapter:
    """Measures one thing after the other until the time is over.

    Each row is on disk before the next measurement begins, as is compiled.tar, which holds the
    results of autotuning and the newest compiled programs.
    """

    def __init__(self, parsed: argparse.Namespace) -> None:
        names = [field.name for field in dataclasses.fields(Settings)]
        self.settings = Settings(**{name: getattr(parsed, name) for name in names})
        self._ends = time.monotonic() + 60 * self.settings.minutes
        self.folder = self.settings.folder.absolute()
        self.work = (self.settings.work or self.folder / "work").absolute()
        self.compiled = self.work / "compiled"
        self._kept = self.folder / "compiled.tar"
        for path in (self.folder, self.compiled):
            path.mkdir(parents=True, exist_ok=True)
        unpack(self.settings.kept or self._kept, self.compiled)
        if self.settings.tiny:
            os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(self.compiled)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.work / "inductor")
        platform, self.kind, _ = results.devices()
        if platform != "gpu" and not self.settings.tiny:
            raise SystemExit("this machine has no GPU: use --tiny to try a chapter on a CPU")

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._ends - time.monotonic()

    def begins(self, what: str, least_s: float = _LEAST_S) -> bool:
        """Returns whether to measure something; prints why not."""
        if self.settings.only not in what:
            return False
        if self.left_s < least_s:
            print(f"=== {what}: skipped, only {max(self.left_s, 0):.0f} s left", flush=True)
            return False
        print(f"=== {what} ({self.left_s:.0f} s left)", flush=True)
        return True

    def row(self, what: str, result: str, command: str) -> None:
        """Prints a result, appends it to rows.md, and keeps what was compiled for it."""
        print(f"{what}: {result}", flush=True)
        results.append_row(self.folder / "rows.md", self.kind, what, result, command)
        pack(self.compiled, self._kept, self.settings.keep_mib)

    def steps(
        self,
        what: str,
        name: str,
        typed: Sequence[str],
        *,
        seconds: float = 4.0,
        measurements: Sequence[str] = ("steps",),
        note: str = "",
        checkout: Path = common_start.CHECKOUT,
        python: str = sys.executable,
        xla_flags: str = "",
        compiled: Path | None = None,
        at_most_s: float = 600.0,
    ) -> dict[str, Any]:
        """Measures a config's step by ``jaxtrain bench``; returns its rows, {} without any.

        Args:
            what: describes it, for the row.
            name: of the config.
            typed: overrides.
            seconds: of steps.
            measurements: of ``bench``.
            note: to be added to the row, such as a published number.
            checkout: the jaxtrain to measure.
            python: the interpreter to measure with.
            xla_flags: in addition.
            compiled: folder of compiled programs; None is that of all chapters.
            at_most_s: time limit.
        """
        if not self.begins(what):
            return {}
        limit_s = min(self.left_s, at_most_s)
        request = {
            "config_name": name,
            "overrides": [*typed],
            "compiled": str(compiled or self.compiled),
            "measurements": [*measurements],
            "seconds": 0.2 if self.settings.tiny else seconds,
            "timeout_s": limit_s,
        }
        given = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip()}
        output = self.finished(
            [python, "-c", _FINDINGS, json.dumps(request)],
            cwd=checkout,
            at_most_s=limit_s + 5,
            more=given,
        )
        try:
            found = json.loads(output.splitlines()[-1])
        except (IndexError, ValueError):
            last = " ".join(output.strip().splitlines()[-2:])
            found = {"failure": "ended without findings", "detail": last}
        with (self.folder / "findings.jsonl").open("a") as file:
            file.write(json.dumps({"what": what, **request, **given, **found}) + "\n")
        lines = results.bench_results(found | {"sweep": {}})
        command = shlex.join(["jaxtrain", "bench", name, *results.shown([*typed])])
        prefix = f"XLA_FLAGS='{xla_flags}' " if xla_flags else ""
        self.row(what, "; ".join([*lines, *filter(None, [note])]), prefix + command)
        rows: dict[str, Any] = found.get("rows", {})
        return rows

    def script(self, what: str, name: str, *arguments: str, at_most_s: float = 600.0) -> None:
        """Runs another benchmark, which appends its own rows."""
        if not self.begins(what):
            return
        measurement = run_all.Measurement(what, (str(HERE.parent / name), *arguments))
        table, found = self.folder / "rows.md", self.work / "found.json"
        run_all.run(measurement, found, table, min(self.left_s, at_most_s), self.kind)
        if not found.exists():
            command = shlex.join(["python", f"benchmarks/{name}", *arguments])
            self.row(what, "no result: it failed or the time was over", command)
        pack(self.compiled, self._kept, self.settings.keep_mib)

    def command(self, *words: str, at_most_s: float = 600.0) -> str:
        """Runs a command of jaxtrain; returns its output, with the exit code if it failed."""
        limit_s = max(min(self.left_s, at_most_s), 1.0)
        return self.finished([sys.executable, "-m", "jaxtrain.main", *words], at_most_s=limit_s)

    def finished(
        self,
        words: Sequence[str],
        *,
        at_most_s: float,
        cwd: Path = common_start.CHECKOUT,
        more: Mapping[str, str] | None = None,
    ) -> str:
        """Runs a program and ends it and its children when it is over or took too long."""
        process = self.started(words, cwd=cwd, more=more)
        try:
            output, _ = process.communicate(timeout=at_most_s)
            code: int | str = process.returncode
        except subprocess.TimeoutExpired:
            output, code = "", f"none, stopped after {at_most_s:.0f} s"
        finally:
            run_all.end(process)
        return output if code == 0 else f"{output}\n{last(output)}: exit code {code}"

    def started(
        self,
        words: Sequence[str],
        *,
        cwd: Path = common_start.CHECKOUT,
        more: Mapping[str, str] | None = None,
    ) -> "subprocess.Popen[str]":
        """Starts a program in a session of its own, with one pipe for its output."""
        return subprocess.Popen(
            words,
            cwd=cwd,
            env=os.environ | dict(more or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def pack(compiled: Path, kept: Path, at_most_mib: float) -> None:
    """Writes the results of autotuning and the newest compiled programs to one file, atomically.

    The first are small and take the longest to compute, so they come first.
    """
    files = [path for path in compiled.rglob("*") if path.is_file()]
    files.sort(key=lambda path: (AUTOTUNE not in path.parts, -path.stat().st_mtime))
    left, part = at_most_mib * 2**20, kept.with_suffix(".part")
    with tarfile.open(part, "w") as archive:
        for path in files:
            size = path.stat().st_size + 1024  # with its header and padding
            if size <= left:
                archive.add(path, path.relative_to(compiled))
                left -= size
    part.replace(kept)


def unpack(kept: Path, compiled: Path) -> None:
    """Unpacks what an earlier chapter kept, if anything; existing files stay."""
    if not kept.is_file():
        return
    with tarfile.open(kept) as archive:
        for member in archive.getmembers():
            if not (compiled / member.name).exists():
                archive.extract(member, compiled, filter="data")


def records(run: Path) -> dict[int, dict[str, Any]]:
    """Returns step -> what metrics.jsonl has of it; an incomplete line is not read."""
    path = run / "metrics.jsonl"
    merged: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        merged.setdefault(record["step"], {}).update(record)
    return merged


def last(output: str) -> str:
    """Returns the last line of an output."""
    return (output.strip().splitlines() or ["no output"])[-1]
