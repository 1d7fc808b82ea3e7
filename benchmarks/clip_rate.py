"""Measures random training clips per second and core, from pieces of videos.

    python benchmarks/clip_rate.py --videos DIR [--seconds N] [--field value ...]

Runs in one process, like one worker, without batches or devices. Sizes are those of `h100_8`
(12x480x720) unless overridden. Clips are resized on the host and not resized,
as if by the device, alternately. Rates are per second of CPU time, so other work on the
machine has little effect, except through caches and shared parts of a core.

It also prints the size of the pieces, and the PSNR of their brightness against the frames before
encoding.
"""

import argparse
import itertools
import math
import os
import tempfile
import time
from pathlib import Path

import av
import common_start
import numpy as np
import results

from jaxtrain import config
from jaxtrain.data import sampler
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.video import pieces, prepare_clips, reader, sets
from jaxtrain.jobs import engines


def main() -> None:
    """Measures and prints all rates; appends rows to the results file if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_flags(parser)
    parser.add_argument("--videos", required=True, help="folder of long videos")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds per measurement (default: 20)"
    )
    flags, overrides = parser.parse_known_args()
    model = config.load("h100_8", overrides).model
    shape = f"{model.frames}x{model.height}x{model.width}"

    def report(what: str, text: str) -> None:
        print(f"{shape}, {what}: {text}", flush=True)
        if flags.results:
            command = "python benchmarks/clip_rate.py --videos DIR"
            results.append_row(flags.results, "cpu", f"clips {shape}, {what}", text, command)

    output = common_start.CHECKOUT / "output"
    output.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as folder:
        cut = Path(folder) / "clips"
        settings = pieces.Settings(height=model.height, width=model.width)
        outcome = prepare_clips.run(
            flags.videos, cut, settings, engine=engines.Processes(1), say=print
        )
        ways = [
            _rows(str(cut), ["--data.convert_on", place, *overrides])
            for place in ("host", "device")
        ]
        host, device = _clips_per_second(ways, flags.seconds)
        size = sum(path.stat().st_size for path in cut.glob("*.tar"))
        report(
            "pieces",
            f"{device:.1f} clips/s per core, {host:.1f} if the host resizes; "
            f"{size / outcome.totals['frames'] * model.frames / 1e6:.3f} MB per clip, "
            f"{_psnr(Path(flags.videos), cut, settings):.1f} dB",
        )


def _psnr(videos: Path, cut: Path, settings: pieces.Settings) -> float:
    """Returns the PSNR of the brightness of each video's first piece, over all of them.

    The first piece must begin with the video.
    """
    errors, table = list[float](), sets.Table.of(cut)
    for video in map(table.video, range(table.length)):
        frames = (
            one for one in reader.Reader(str(videos / video.name)) if isinstance(one, reader.Frame)
        )
        numbers = list(range(5, video.pieces[0].frames, 8))  # of each group of pictures
        encoded = dict[int, av.VideoFrame]()
        pieces.read(video.pieces[0].path, video.pieces[0].span, numbers, encoded.__setitem__)
        chosen = itertools.islice(frames, 5, None, 8)
        for number, before in zip(range(len(numbers)), chosen, strict=False):
            small = pieces.shrinking(before.look, settings)(before.picture)
            errors.append(float(np.square(_luma(small) - _luma(encoded[number])).mean()))
    return 10 * math.log10(255**2 / float(np.mean(errors)))


def _luma(frame: av.VideoFrame) -> np.ndarray:
    plane = frame.planes[0]
    rows = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
    return rows[: frame.height, : frame.width].astype(np.float32)


def _rows(path: str, overrides: list[str]) -> sampler.TrainingRows:
    """Returns the training split in order."""
    more = ["--data.path", path, *overrides]
    run = config.load("h100_8", more)
    source = run.data.open(run.model, seed=run.seed, say=print).train
    quarantine = Quarantine(Path(os.devnull))
    return sampler.TrainingRows(source, sampler.order_of(source, 0), 0, 1, 0, 1, 2**40, quarantine)


def _clips_per_second(ways: list[sampler.TrainingRows], seconds: float) -> list[float]:
    """Returns clips per second of CPU time for each way, measured alternately."""
    made, took = [0] * len(ways), [0.0] * len(ways)
    for rows in ways:
        rows[0]
    turn, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for way, rows in enumerate(ways):
            since = time.process_time()
            rows[turn]
            made[way] += 1
            took[way] += time.process_time() - since
        turn += 1
    return [count / spent for count, spent in zip(made, took, strict=True)]


if __name__ == "__main__":
    main()
