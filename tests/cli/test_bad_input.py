"""A command that reads a video: bad input gives a one-line error or a correct result.

tests/data/video has the same for sets of videos, as `evaluate` and `prepare clips` read them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from data.video import sample_videos
from models.video_ae import small_autoencoder

from jaxtrain import main

MAKERS: dict[str, Callable[[Path], Any]] = {
    "gone.mp4": lambda path: None,
    "text.mp4": lambda path: path.write_text("not a video"),
    "empty.mp4": lambda path: path.touch(),
    "none.mp4": sample_videos.without_frames,
    "one.mp4": lambda path: sample_videos.write(path, sample_videos.busy(1, height=16, width=24)),
    "odd.mkv": lambda path: sample_videos.write(
        path, sample_videos.busy(8, height=33, width=47), codec="ffv1", pix_fmt="bgr0"
    ),
    "sound.mp4": lambda path: small_autoencoder.with_sound(path, [], seconds=0.5),
}

# The error on stderr; None if the command succeeds.
ERRORS = {
    "gone.mp4": "gone.mp4: no such file or folder; pass a video",
    "text.mp4": "text.mp4: cannot be read: Invalid data",
    "empty.mp4": "empty.mp4: is empty: pass an intact video file",
    "none.mp4": "none.mp4: has no video",
    "one.mp4": None,
    "odd.mkv": None,
    "sound.mp4": "sound.mp4: has no video stream: pass an intact video file",
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_autoencoder.save(tmp_path_factory.mktemp("weights") / "small.safetensors")


@pytest.mark.parametrize("name", MAKERS)
def test_bad_input_gives_one_line_or_a_correct_result(
    name: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video, out = tmp_path / name, tmp_path / "out"
    out.mkdir()
    MAKERS[name](video)
    code = main.main(["encode", str(weights), str(video), str(out / "z.safetensors")])
    printed, error = capsys.readouterr(), ERRORS[name]
    if error is None:
        assert (code, printed.err) == (0, "")
        latents = safetensors.numpy.load_file(out / "z.safetensors")["latents"]
        assert latents.shape[1:] == ((5, 6, 4) if name == "odd.mkv" else (2, 3, 4))
        return
    assert code == 2
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert error in printed.err
    assert not list(out.iterdir())


@pytest.mark.usefixtures("own_cache")
def test_without_a_usable_video_there_are_no_clips(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.mp4").write_text("not a video")
    typed = ["prepare", "clips", str(tmp_path / "text.mp4"), str(tmp_path / "out")]
    assert main.main([*typed, "--workers", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: no clip could be cut from 1 video; ")
    assert printed.err.count("\n") == 1
    assert "text.mp4: cannot be read: Invalid data" in printed.out
