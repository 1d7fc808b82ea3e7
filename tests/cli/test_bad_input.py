"""Commands that read videos: bad input gives a one-line error or a correct result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest
import safetensors.numpy
from data.video import sample_videos
from models.video_ae import small_autoencoder

from jaxtrain import main
from jaxtrain.data.video import pieces, sets

SIZE = ("--height", 16, "--width", 24)

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
NO_VIDEO = {
    "gone.mp4": "gone.mp4: no such file or folder; pass a video",
    "text.mp4": "text.mp4: cannot be read: Invalid data",
    "empty.mp4": "empty.mp4: is empty: pass an intact video file",
    "none.mp4": "none.mp4: has no video",
    "one.mp4": None,
    "odd.mkv": None,
    "sound.mp4": "sound.mp4: has no video stream: pass an intact video file",
}
NOT_USABLE = "{name}: none of 1 videos can be used (the reasons are above): fix or replace them"
NO_CLIPS = "no clip could be cut from 1 video; "
ERRORS: dict[str, dict[str, str | None]] = {
    "encode": NO_VIDEO,
    "evaluate": dict.fromkeys(MAKERS, NOT_USABLE)
    | {"gone.mp4": "gone.mp4: no such file or folder", "odd.mkv": None},
    "clips": dict.fromkeys(MAKERS, NO_CLIPS)
    | {"gone.mp4": "gone.mp4: no such file or folder", "odd.mkv": None},
}
# The reason on stdout, if the error does not contain it.
REASONS = {
    "text.mp4": "text.mp4: cannot be read: Invalid data",
    "empty.mp4": "empty.mp4: is empty",
    "none.mp4": "none.mp4: has no video",
    "one.mp4": "one.mp4: ",
    "sound.mp4": "sound.mp4: has no video stream",
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_autoencoder.save(tmp_path_factory.mktemp("weights") / "small.safetensors")


pytestmark = pytest.mark.usefixtures("own_cache")


def arguments(command: str, weights: Path, video: Path, out: Path) -> list[Any]:
    return {
        "encode": ["encode", weights, video, out / "z.safetensors"],
        "evaluate": [
            *("evaluate", weights, "--data", video, "--frames", 8, *SIZE),
            *("--json", out / "found.json"),
        ],
        "clips": [
            *("prepare", "clips", video, out / "pieces", "--height", 16, "--width", 16),
            *("--frames", 8, "--min-frames", 2, "--min-side", 16, "--workers", 1),
        ],
    }[command]


def run(*command_line: Any) -> int:
    return main.main([str(one) for one in command_line])


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("command", ERRORS)
def test_bad_input_gives_one_line_or_a_correct_result(
    command: str, name: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video, out = tmp_path / name, tmp_path / "out"
    out.mkdir()
    MAKERS[name](video)
    code = run(*arguments(command, weights, video, out))
    printed = capsys.readouterr()
    error = ERRORS[command][name]
    if error is None:
        assert (code, printed.err) == (0, "")
        assert_correct(command, out, odd=name == "odd.mkv")
        return
    assert code == 2
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert error.format(name=name) in printed.err
    if error in (NOT_USABLE, NO_CLIPS):
        assert REASONS[name] in printed.out
    if command in ("encode", "evaluate"):
        assert not list(out.iterdir())


def assert_correct(command: str, out: Path, *, odd: bool) -> None:
    match command:
        case "encode":
            latents = safetensors.numpy.load_file(out / "z.safetensors")["latents"]
            assert latents.shape[1:] == ((5, 6, 4) if odd else (2, 3, 4))
        case "evaluate":
            (clip,) = json.loads((out / "found.json").read_text())["clips"]
            assert clip["video"] == "odd.mkv"
            assert 0 < clip["values"][0]["psnr"] < 60
        case "clips":
            (piece,) = sets.Table.of(out / "pieces").video(0).pieces
            frames = dict[int, av.VideoFrame]()
            pieces.read(piece.path, piece.span, list(range(8)), frames.__setitem__)
            assert sorted(frames) == list(range(piece.frames)) == list(range(8))
            height, width = piece.look.height, piece.look.width
            assert {(frame.height, frame.width) for frame in frames.values()} == {(height, width)}
            assert (height % 2, width % 2) == (0, 0)
