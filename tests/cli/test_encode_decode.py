"""``jaxtrain encode`` and ``decode``: a video to a file of latents, and back."""

import json
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import sample_videos
import small_autoencoder

from jaxtrain import main
from jaxtrain.cli import decode, encode
from jaxtrain.data.video import reading
from jaxtrain.errors import InputError
from jaxtrain.inference import video as autoencoding
from jaxtrain.storage import tensor_stream


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights, a video (10 frames, 20x36) and its latents."""
    folder = tmp_path_factory.mktemp("place")
    small_autoencoder.save(folder / "weights.safetensors")
    sample_videos.write(folder / "clip.mp4", sample_videos.busy(10, height=20, width=36), fps=12)
    assert (
        run(
            "encode",
            *(folder / name for name in ("weights.safetensors", "clip.mp4", "z.safetensors")),
        )
        == 0
    )
    return folder


def run(*arguments: Any) -> int:
    return main.main([*map(str, arguments)])


def header(path: Path) -> dict[str, Any]:
    with safetensors.safe_open(path, framework="numpy") as file:
        return dict(file.metadata())


def test_latents_equal_those_of_the_entire_video(place: Path) -> None:
    found = safetensors.numpy.load_file(place / "z.safetensors")
    assert list(found) == ["latents"]
    latents = found["latents"]
    assert latents.shape == (4, 3, 5, 4)  # decoding 10 frames takes 13; 24x40 in squares of 8
    assert latents.dtype == np.float32
    images = [one.pixels for one in reading.Video(place / "clip.mp4").pictures()]
    video = np.pad(np.stack(images), ((0, 6), (0, 4), (0, 4), (0, 0)), mode="edge")
    module = small_autoencoder.module(place / "weights.safetensors")
    expected = np.asarray(module.encode(video[None].astype(np.float32) / 255))[0]
    np.testing.assert_allclose(latents, expected, atol=1e-5)


def test_the_file_describes_its_video(place: Path) -> None:
    metadata = header(place / "z.safetensors")
    model = json.loads(metadata.pop("jaxtrain_model"))
    assert model["class"] == "video_ae"
    assert metadata == {
        "fps": "12",
        "frames": "10",
        "height": "20",
        "width": "36",
        "padding_bottom": "4",
        "padding_right": "4",
        "pixel_aspect": "1",
    }


def test_a_variable_frame_rate_is_reported(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = sample_videos.busy(6, height=16, width=16)
    clip = sample_videos.write_at(tmp_path / "c.mkv", images, [0, 40, 50, 200, 1000, 1010])
    target = tmp_path / "z.safetensors"
    assert run("encode", place / "weights.safetensors", clip, target) == 0
    printed = capsys.readouterr().out
    rate = float(Fraction(header(target)["fps"]))
    assert "c.mkv has a variable frame rate" in printed
    off_s = max(abs(t / 1000 - n / rate) for n, t in enumerate([0, 40, 50, 200, 1000, 1010]))
    assert f"average of {rate:.5g} frames per second is kept" in printed
    assert f"shifts frames by up to {off_s:.2g} s" in printed
    assert run("encode", place / "weights.safetensors", place / "clip.mp4", target) == 0
    assert "variable frame rate" not in capsys.readouterr().out


def test_encode_and_decode_equal_reconstruct(place: Path, tmp_path: Path) -> None:
    weights, clip = place / "weights.safetensors", place / "clip.mp4"
    assert run("decode", weights, place / "z.safetensors", tmp_path / "d.mp4", "--crf", 0) == 0
    assert run("reconstruct", weights, clip, tmp_path / "r.mp4", "--crf", 0) == 0
    found, expected = (small_autoencoder.read(tmp_path / name) for name in ("d.mp4", "r.mp4"))
    assert found.shape == (10, 20, 36, 3)
    np.testing.assert_array_equal(found, expected)
    assert reading.Video(tmp_path / "d.mp4").rate == 12


@pytest.mark.parametrize(
    ("dtype", "type_", "close"),
    [("bfloat16", ml_dtypes.bfloat16, 8e-3), ("float16", np.float16, 1e-3)],
)
def test_smaller_dtypes(place: Path, dtype: str, type_: Any, close: float, tmp_path: Path) -> None:
    full = safetensors.numpy.load_file(place / "z.safetensors")["latents"]
    with tensor_stream.writing(tmp_path / "z.safetensors", "latents", dtype, {"a": "b"}) as rows:
        for row in full:
            rows.add(row)
    shape, about, found = tensor_stream.read(tmp_path / "z.safetensors", "latents")
    assert (shape, about) == (full.shape, {"a": "b"})
    np.testing.assert_array_equal(np.stack(list(found)), full.astype(type_).astype(np.float32))
    np.testing.assert_allclose(full.astype(type_).astype(np.float32), full, rtol=close, atol=1e-6)
    with safetensors.safe_open(tmp_path / "z.safetensors", framework="flax") as file:
        assert file.get_tensor("latents").dtype == dtype


def test_a_preview_has_a_lower_resolution_and_frame_rate(place: Path, tmp_path: Path) -> None:
    preview = small_autoencoder.save(
        tmp_path / "p.safetensors", time_upscale=(True, False), space_upscale=(True, True, False)
    )
    assert run("decode", preview, place / "z.safetensors", tmp_path / "out.mp4") == 0
    assert small_autoencoder.read(tmp_path / "out.mp4").shape == (5, 10, 18, 3)
    assert reading.Video(tmp_path / "out.mp4").rate == 6


def changed(place: Path, to: Path, **about: str | None) -> Path:
    """Copies the latents with changed metadata; None removes an entry."""
    metadata = header(place / "z.safetensors") | about
    kept = {name: text for name, text in metadata.items() if text is not None}
    safetensors.numpy.save_file(safetensors.numpy.load_file(place / "z.safetensors"), to, kept)
    return to


def cut(place: Path, to: Path) -> Path:
    to.write_bytes((place / "z.safetensors").read_bytes()[:-100])
    return to


def unrelated(place: Path, to: Path) -> Path:
    del place
    safetensors.numpy.save_file({"weights": np.zeros(3, np.float32)}, to)
    return to


def integers(place: Path, to: Path) -> Path:
    latents = safetensors.numpy.load_file(place / "z.safetensors")["latents"]
    safetensors.numpy.save_file({"latents": latents.astype(np.int32)}, to)
    return to


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda place, to: place / "nowhere.safetensors", "nowhere.* does not exist"),
        (lambda place, to: place, "is a folder"),
        (lambda place, to: place / "clip.mp4", r"clip\.mp4 is not a complete \.safetensors file"),
        (cut, "is not a complete"),
        (
            unrelated,
            "does not contain 'latents', which jaxtrain encode writes; it contains weights",
        ),
        (integers, "latents has dtype I32: use one of F32, BF16, F16"),
        (lambda place, to: changed(place, to, fps=None), "lacks the metadata fps"),
        (lambda place, to: changed(place, to, fps="0"), "fps and pixel_aspect must be above 0"),
        (lambda place, to: changed(place, to, fps="1/0"), "its video metadata is invalid"),
        (
            lambda place, to: changed(place, to, width="many"),
            "its video metadata is invalid: .*'many'.*: encode the video again",
        ),
        (
            lambda place, to: changed(place, to, height="9" * 400),
            r"height is '9{20}\.\.\.', and the limit",
        ),
        (
            lambda place, to: changed(place, to, frames="9" * 4300),
            r"frames is '9{20}\.\.\.', and the limit",
        ),
        (lambda place, to: changed(place, to, frames="2147483648"), "limit is 2,147,483,647"),
        (
            lambda place, to: changed(place, to, height="2147483647", padding_bottom="2147483641"),
            "pass the model that encoded the video",
        ),
        (lambda place, to: changed(place, to, frames="14"), "4 latents, too few for 14 frames"),
        (
            lambda place, to: changed(place, to, height="50"),
            "pass the model that encoded the video",
        ),
    ],
)
def test_files_that_are_not_latents_of_a_video_are_refused(
    place: Path, make: Any, message: str, tmp_path: Path
) -> None:
    given = make(place, tmp_path / "given.safetensors")
    with pytest.raises(InputError, match=message):
        decode.main(
            [str(one) for one in (place / "weights.safetensors", given, tmp_path / "o.mp4")]
        )
    assert not (tmp_path / "o.mp4").exists()


def test_another_model_is_refused(place: Path, tmp_path: Path) -> None:
    for fields in ({"latent_channels": 6}, {"patch_size": 2}):
        other = small_autoencoder.save(tmp_path / "other.safetensors", **fields)
        with pytest.raises(InputError, match="pass the model that encoded the video"):
            decode.main([str(other), str(place / "z.safetensors"), str(tmp_path / "o.mp4")])


def test_a_broken_video_leaves_no_file(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    bad = sample_videos.garble(sample_videos.write(tmp_path / "g.mp4", sample_videos.busy(30)))
    weights = place / "weights.safetensors"
    with pytest.raises(InputError, match=r"g\.mp4"):
        encode.main([str(weights), str(bad), str(folder / "z.safetensors")])
    assert not list(folder.iterdir())
    with pytest.raises(InputError, match=r"does not end with \.safetensors"):
        encode.main([str(weights), str(place / "clip.mp4"), str(folder / "z.npz")])


def test_rows_are_written_one_by_one(tmp_path: Path) -> None:
    """Only the last row is kept in memory, and the file appears once it is complete."""
    path = tmp_path / "rows.safetensors"
    with tensor_stream.writing(path, "rows", "float32", {}) as rows:
        for number in range(1000):
            rows.add(np.full((10, 10), number, np.float32))
        (beside,) = tmp_path.iterdir()
        assert beside.stat().st_size > 1000 * 350
        assert not path.exists()
    assert safetensors.numpy.load_file(path)["rows"].shape == (1000, 10, 10)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert path.stat().st_size == 8 + length + 1000 * 400


def test_latents_do_not_accumulate_on_the_device(place: Path) -> None:
    """A result is fetched before two more are requested."""
    requested = []

    def arrays() -> Any:
        for number in range(10):
            requested.append(number)
            yield np.full(3, number)

    for number, array in enumerate(autoencoding.fetched(arrays())):
        assert array[0] == number
        assert len(requested) <= number + 3
