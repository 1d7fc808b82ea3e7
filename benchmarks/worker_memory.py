"""Measures the memory and the start of a worker process on a video data set of many files.

    python benchmarks/worker_memory.py --files 1000 1000000 --folder /tmp/worker_memory

Makes the entries of so many prepared clips, all with the path of one real video, and starts the
training pipeline with one worker on them. Prints one JSON object for each number of files: the
size of what the worker receives, its anonymous, resident, and proportional memory
(/proc/PID/smaps_rollup), and the seconds until its first batch.
"""

import argparse
import json
import pickle
import time
from pathlib import Path
from typing import Any

import jax
import psutil

from jaxtrain import config
from jaxtrain.data import cache, pipeline, worker_process
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.video import demo_videos, index
from jaxtrain.data.video import files as video_files
from jaxtrain.data.video.file_table import FileTable
from jaxtrain.data.video.packets import Keyframe
from jaxtrain.sharding import make_mesh

_KEYFRAMES = 12  # of a prepared clip of 96 frames
_BATCHES = 50


def table(folder: Path, number: int) -> FileTable:
    """Returns a data set of so many files."""
    videos = demo_videos.prepare(cache.root(str(folder)), print)
    found = video_files.find(str(videos), "--data.path", folder, print)[:1]
    (real,) = index.build(found, folder, decode_all=False, say=print)

    def keyframes(start: int) -> tuple[Keyframe, ...]:  # as different as those of real files
        return tuple(Keyframe(start + 8 * 512 * n, 8 * n) for n in range(_KEYFRAMES))

    entries = (
        index.Entry(
            name=f"videos/{n // 1000:06}/clip-{n:09}.mp4",
            path=real.path,
            size=real.size,
            mtime_ns=real.mtime_ns,
            info=real.scanned._replace(keyframes=keyframes(n)),
        )
        for n in range(number)
    )
    return FileTable.stored(entries, folder, print)


def measured(folder: Path, number: int) -> dict[str, Any]:
    """Starts the pipeline on so many files; returns what it measured."""
    run = config.load("demo", ["--data.batch_size", "4"])
    source = run.data.clips(run.model, table(folder, number), train=True)
    mesh = make_mesh(config.Mesh(data=1, fsdp=1, shard="none"), jax.local_devices()[:1])
    began = time.perf_counter()
    with worker_process.started_by_us():  # as in a run: without jax
        batches = pipeline.TrainingBatches(
            source,
            mesh,
            run.batch_spec(4),
            start=0,
            seed=0,
            workers=1,
            prefetch=1,
            quarantine=Quarantine(folder / "quarantine.jsonl"),
        )
        next(batches)
    first_s = time.perf_counter() - began
    for _ in range(_BATCHES):
        next(batches)
    workers = [one for one in psutil.Process().children() if "spawn_main" in str(one.cmdline())]
    (worker,) = workers
    lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()[1:]
    mib = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}
    batches.close()
    return {
        "files": number,
        "pickled_bytes": len(pickle.dumps(source)),
        "anonymous_mib": round(mib["Anonymous"], 1),
        "resident_mib": round(mib["Rss"], 1),
        "proportional_mib": round(mib["Pss"], 1),
        "first_batch_s": round(first_s, 1),
    }


def main() -> None:
    """Measures each number of files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--folder", type=Path, required=True, help="folder for the files' columns")
    flags = parser.parse_args()
    folder = flags.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for number in flags.files:
        print(json.dumps(measured(folder, number)), flush=True)


if __name__ == "__main__":
    main()
