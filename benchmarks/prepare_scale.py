"""Measures `prepare clips` on many small files: rate, CPU time, and memory of driver and workers.

    python benchmarks/prepare_scale.py --files 100000 --engine ray --folder /tmp/scale
    python benchmarks/prepare_scale.py --files 60 --frames 160 --side 256 --workers 1 2 1 2
    python benchmarks/prepare_scale.py --tokens --files 100000

With --tokens, it measures `prepare tokens` on .txt files of a kilobyte instead, and the largest
resident memory (VmHWM) of the command and of each worker, in MiB.

Generates videos of noise (hard links of eight), prepares them once for each number of workers, and
meanwhile reads from /proc the anonymous memory of the command and of each of its workers, which are
its child processes or, with `--engine ray`, those of a Ray cluster on this machine. Prints one JSON
object per run. The memory is that at tenths of the files, in MiB.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil

KINDS = 8
PER_FOLDER = 1000


def generate(folder: Path, files: int, frames: int, side: int) -> None:
    """Writes ``files`` videos of ``frames`` frames of ``side`` x ``side`` pixels."""
    for number in range(files):
        path = folder / f"{number // PER_FOLDER:03}" / f"{number:06}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number >= KINDS:
            os.link(folder / "000" / f"{number % KINDS:06}.mp4", path)
            continue
        rng = np.random.default_rng(number)
        with av.open(str(path), "w") as container:
            stream: Any = container.add_stream("libx264", rate=25)
            stream.height = stream.width = side
            stream.pix_fmt = "yuv420p"
            for _ in range(frames):
                image = rng.integers(0, 256, (side, side, 3), np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
            container.mux(stream.encode())


def anonymous_mib(pid: int) -> float:
    """Returns the anonymous memory of a process, MiB; 0 if it has ended."""
    try:
        found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def measure(source: Path, out: Path, files: int, workers: int, engine: str) -> dict[str, Any]:
    """Runs the command once."""
    size = ("--height", "64", "--width", "64", "--frames", "24", "--min-frames", "8")
    flags = [*size, "--min-side", "16", "--keep-cuts", "--workers", str(workers)]
    if engine == "ray":
        flags += ["--engine", "ray", "--ray-address", "local"]
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxtrain", "prepare", "clips", source, out, *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    driver, tenths, cpu = psutil.Process(process.pid), [], {}
    first = None
    records = out / ".prepare" / "records"
    while process.poll() is None:
        time.sleep(max(1, files / 10_000))  # counting records takes time, too
        done = sum(1 for _ in records.glob("*/*"))
        workers_mib = [0.0]
        for child in driver.children(recursive=True):
            try:
                name = " ".join(child.cmdline())
                cpu[child.pid] = sum(child.cpu_times()[:2])
            except psutil.Error:
                continue
            if name.startswith("ray::") or (engine == "local" and "spawn_main" in name):
                workers_mib.append(anonymous_mib(child.pid))
        if done and first is None:
            first = (time.monotonic(), done)
        if done * 10 // files >= len(tenths):
            tenths.append((done, round(anonymous_mib(process.pid)), round(max(workers_mib))))
            print(f"{time.monotonic() - began:.0f} s: {tenths[-1]}", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    said = process.communicate()[0]
    assert process.returncode == 0, said
    report = json.loads((out / "report.json").read_text())
    assert report["videos"] == report["cut"] == files, report
    start, before = first or (began, 0)
    return {
        "engine": engine,
        "workers": workers,
        "files": files,
        "seconds": round(seconds, 1),
        "files_per_second_after_start": round((files - before) / (began + seconds - start), 2),
        "cpu_seconds_of_workers": round(sum(cpu.values()), 1),
        "files_driver_worker_mib": tenths,
    }


def measure_tokens(folder: Path, files: int, workers: int, engine: str) -> dict[str, Any]:
    """Generates text files and runs `prepare tokens` once."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice([*"aeinorst"], rng.integers(2, 9))) for _ in range(5000)]
    for number in range(files):
        path = folder / "texts" / f"{number // PER_FOLDER:03}" / f"{number:06}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(words[at] for at in rng.integers(0, len(words), 180)) + ".\n")
    flags = ["--workers", str(workers)]
    if engine == "ray":
        flags += ["--engine", "ray", "--ray-address", "local"]
    data = ["--data.path", folder / "texts", "--data.cache_dir", folder / "cache"]
    command = [sys.executable, "-m", "jaxtrain", "prepare", "tokens"]
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, "--config", "demo_mlm", *map(str, data), *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    driver = psutil.Process(process.pid)
    peaks: dict[int, float] = {}
    parents: set[int] = {process.pid}
    while process.poll() is None:
        for one in (driver, *driver.children(recursive=True)):
            try:
                name = " ".join(one.cmdline())
                status = Path(f"/proc/{one.pid}/status").read_text()
            except (psutil.Error, OSError):
                continue
            found = re.search(r"VmHWM:\s+(\d+)", status)
            if found and (one.pid in parents or name.startswith("ray::") or "spawn_main" in name):
                peaks[one.pid] = int(found[1]) / 1024
        time.sleep(0.2)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    driver_mib = peaks.pop(process.pid)
    return {
        "engine": engine,
        "workers": workers,
        "files": files,
        "seconds": round(time.monotonic() - began, 1),
        "driver_mib": round(driver_mib),
        "worker_mib": sorted(round(peak) for peak in peaks.values()),
    }


def main() -> None:
    """Generates, measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--folder", type=Path, default=Path("prepare_scale"))
    parser.add_argument("--tokens", action="store_true", help="measure prepare tokens instead")
    flags = parser.parse_args()
    if flags.tokens:
        for workers in flags.workers:
            folder = flags.folder / f"tokens{workers}"
            found = measure_tokens(folder, flags.files, workers, flags.engine)
            print(json.dumps(found), flush=True)
            shutil.rmtree(folder)
        return
    source = flags.folder / "videos"
    generate(source, flags.files, flags.frames, flags.side)
    try:
        for number, workers in enumerate(flags.workers):
            out = flags.folder / f"out{number}"
            print(json.dumps(measure(source, out, flags.files, workers, flags.engine)), flush=True)
            shutil.rmtree(out)
    finally:
        shutil.rmtree(flags.folder)


if __name__ == "__main__":
    main()
