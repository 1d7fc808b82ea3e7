"""A short outage of the data disk changes nothing; a long one ends the run with exit code 75."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import program
import pytest
from data import disk_outage
from data.video import sample_videos

from jaxtrain.data.number_file import NumberFile
from jaxtrain.storage import disks

VIDEO = (
    *("--config", "demo", "--model.frames", "4", "--model.height", "16", "--model.width", "16"),
    *("--model.encoder_width", "8", "--model.decoder_widths", "8", "8", "8", "8"),
    *("--data.batch_size", "4", "--loop.epochs", "None", "--loop.eval_every", "None"),
    *("--loop.log_every", "1", "--checkpoint.best_metric", "None"),
)


@pytest.mark.long
def test_an_outage_of_the_data_disk(tmp_path: Path) -> None:
    library = disk_outage.build(tmp_path)
    for film in range(8):
        sample_videos.write(tmp_path / "originals" / f"{film}.mp4", 12)
    size = ("--height", "16", "--width", "16", "--min-frames", "8", "--min-side", "16")
    program.run(tmp_path, "prepare", "clips", tmp_path / "originals", tmp_path / "films", *size)
    arguments = (*VIDEO, "--data.path", tmp_path / "films", "--loop.steps", "8")
    arguments += ("--data.workers", "1", "--output-dir")
    program.train(tmp_path, *arguments, "calm")
    calm = program.losses(tmp_path / "calm")
    assert len(calm) == 8

    outage = disk_outage.variables(library, "/films/", 3.0)
    program.train(tmp_path, *arguments, "disturbed", **outage)
    assert program.losses(tmp_path / "disturbed") == calm
    assert not list((tmp_path / "disturbed").glob("quarantine*"))

    outage = disk_outage.variables(library, "/films/", 1e6)
    waits = disk_outage.wait_for(tmp_path, 1.0)
    ended = program.run(tmp_path, *arguments, "ended", **outage, **waits)
    assert ended.returncode == 75, ended.stdout + ended.stderr
    (line,) = ended.stderr.splitlines()
    assert "bring the disk back" in line
    assert not list((tmp_path / "ended").glob("quarantine*"))


def test_numbers_are_read_after_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is opened again, because its disk may have been mounted again."""
    path, opened = tmp_path / "numbers", list[int]()
    np.arange(9, dtype=np.int64).tofile(path)
    numbers, real_open, real_pread = NumberFile(str(path), np.int64), os.open, os.pread

    def open_again(*given: Any) -> int:
        opened.append(real_open(*given))
        return opened[-1]

    def pread(descriptor: int, *rest: Any) -> bytes:
        if len(opened) < 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real_pread(descriptor, *rest)

    monkeypatch.setattr(os, "open", open_again)
    monkeypatch.setattr(os, "pread", pread)
    monkeypatch.setattr(disks, "_FIRST_PAUSE_S", 0.0)
    assert disks.when_readable(lambda: numbers.read(2, 5)).tolist() == [2, 3, 4]
    assert len(opened) == 3


def test_a_file_of_numbers_is_not_closed_while_a_thread_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor might then be that of another file, whose content the thread would get."""
    np.arange(9, dtype=np.int64).tofile(tmp_path / "numbers")
    numbers, real_pread = NumberFile(str(tmp_path / "numbers"), np.int64), os.pread
    failing, both = threading.Event(), threading.Barrier(2)

    def pread(descriptor: int, *rest: Any) -> bytes:
        if threading.current_thread() is threading.main_thread():
            both.wait()  # the other thread has opened the file, and not yet read it
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        both.wait()
        failing.wait()
        return real_pread(descriptor, *rest)

    numbers.read(0, 1)
    monkeypatch.setattr(os, "pread", pread)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(numbers.read, 2, 5)
        with pytest.raises(disks.DiskAway):
            numbers.read(0, 1)
        failing.set()
        assert reading.result().tolist() == [2, 3, 4]
