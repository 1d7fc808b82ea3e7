"""A short outage of the data disk changes nothing; a long one ends the run with exit code 75."""

import errno
from pathlib import Path

import disk_outage
import program
import pytest
import sample_videos

SECONDS = 3.0
VIDEO = (
    *("--config", "demo", "--model.frames", "4", "--model.height", "16", "--model.width", "16"),
    *("--model.encoder_width", "8", "--model.decoder_widths", "8", "8", "8", "8"),
    *("--data.batch_size", "4", "--loop.epochs", "None", "--loop.eval_every", "None"),
    *("--loop.log_every", "1", "--checkpoint.best_metric", "None"),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return disk_outage.build(tmp_path_factory.mktemp("outage"))


@pytest.mark.parametrize(
    ("kind", "number"), [("video", errno.ESTALE), ("text", errno.EIO)], ids=["video", "text"]
)
def test_an_outage_of_the_data_disk(tmp_path: Path, library: Path, kind: str, number: int) -> None:
    if kind == "video":
        for film in range(8):
            sample_videos.write(tmp_path / "films" / f"{film}.mp4", 12)
        arguments, path = (*VIDEO, "--data.path", tmp_path / "films"), "/films/"
    else:
        arguments, path = program.TINY_MLM, "train.spans"
    arguments = (*arguments, "--loop.steps", "10", "--data.workers", "2", "--output-dir")
    program.train(tmp_path, *arguments, "calm")
    calm = program.losses(tmp_path / "calm")
    assert len(calm) == 10

    outage = disk_outage.variables(library, path, number=number, seconds=SECONDS, after=9)
    program.train(tmp_path, *arguments, "disturbed", **outage)
    assert program.losses(tmp_path / "disturbed") == calm
    assert not list((tmp_path / "disturbed").glob("quarantine*"))

    outage = disk_outage.variables(library, path, number=number, seconds=1e6, after=9)
    waits = disk_outage.wait_for(tmp_path, 1.0)
    ended = program.run(tmp_path, *arguments, "ended", **outage, **waits)
    assert ended.returncode == 75, ended.stdout + ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.endswith("bring the disk back, and start again")
    assert not list((tmp_path / "ended").glob("quarantine*"))
