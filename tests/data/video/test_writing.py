"""Videos are written with the same bytes on any machine."""

import os
import subprocess
import sys
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import numpy as np

from jaxtrain.data.video import writing
from jaxtrain.data.video.reading import Frame

WRITE = """
import hashlib
import os
import sys
from pathlib import Path
import sample_videos as sample
import test_writing
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])
file = test_writing.write(Path(sys.argv[1]), sample.busy(12, height=256, width=256))
print(hashlib.sha256(file.read_bytes()).hexdigest())
"""


def write(path: Path, frames: Iterable[np.ndarray]) -> Path:
    each = {"rate": Fraction(25), "time_base": Fraction(1, 25)}
    with writing.writing(path, **each, crf=16) as out:
        for number, frame in enumerate(frames):
            out.add(Frame(frame, number))
    return path


def test_the_bytes_do_not_depend_on_the_number_of_cores(tmp_path: Path, checkout: Path) -> None:
    assert len(os.sched_getaffinity(0)) > 1
    here = (checkout, checkout / "tests", checkout / "tests/data/video")
    found = [
        subprocess.run(
            [sys.executable, "-c", WRITE, tmp_path / f"{cores}.mp4", str(cores)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, here))},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for cores in (1, 2)
    ]
    assert found[0] == found[1]


def test_the_bytes_do_not_depend_on_memory_addresses(tmp_path: Path) -> None:
    """Of repeated files, 1% to 2% would differ, so this checks the encoder's options."""
    with writing.writing(
        tmp_path / "a.mp4", rate=Fraction(25), time_base=Fraction(1, 25), crf=16
    ) as out:
        out.add(Frame(np.zeros((32, 32, 3), np.uint8), 0))
        assert out._options["x264-params"] == "cpu-independent=1"
