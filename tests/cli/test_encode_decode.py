"""``jaxtrain encode`` and ``decode``: a video to a file of latents, and back."""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from cli.cluster_here import ClusterHere
from data.video import sample_videos
from models.video_ae import small_autoencoder

from jaxtrain import main
from jaxtrain.cli import command_line
from jaxtrain.errors import InputError
from jaxtrain.inference.video import autoencoder, reading, tensor_stream, writing
from jaxtrain.jobs import engines, resumable


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


def test_encode_and_decode_equal_reconstruct(place: Path, tmp_path: Path) -> None:
    weights, clip = place / "weights.safetensors", place / "clip.mp4"
    assert run("decode", weights, place / "z.safetensors", tmp_path / "d.mp4", "--crf", 0) == 0
    assert run("reconstruct", weights, clip, tmp_path / "r.mp4", "--crf", 0) == 0
    found, expected = (small_autoencoder.read(tmp_path / name) for name in ("d.mp4", "r.mp4"))
    assert found.shape == (10, 20, 36, 3)
    np.testing.assert_array_equal(found, expected)
    assert reading.Video(tmp_path / "d.mp4").rate == 12


def changed(place: Path, to: Path, **about: str | None) -> Path:
    """Copies the latents with changed metadata; None removes an entry."""
    metadata = header(place / "z.safetensors") | about
    kept = {name: text for name, text in metadata.items() if text is not None}
    safetensors.numpy.save_file(safetensors.numpy.load_file(place / "z.safetensors"), to, kept)
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
        (
            lambda place, to: place / "nowhere.safetensors",
            "IN .*nowhere.safetensors: no such file or folder; pass latents",
        ),
        (lambda place, to: place / "clip.mp4", r"clip\.mp4 is not a complete \.safetensors file"),
        (
            unrelated,
            "does not contain 'latents', which jaxtrain encode writes; it contains weights",
        ),
        (integers, "latents has dtype I32: use one of F32, BF16, F16"),
        (lambda place, to: changed(place, to, fps=None), "lacks the metadata fps"),
        (lambda place, to: changed(place, to, fps="0"), "fps and pixel_aspect must be above 0"),
        (
            lambda place, to: changed(place, to, width="many"),
            "its video metadata is invalid: .*'many'.*: encode the video again",
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
        command_line.run(
            "decode",
            [str(one) for one in (place / "weights.safetensors", given, tmp_path / "o.mp4")],
        )
    assert not (tmp_path / "o.mp4").exists()


def test_a_broken_video_leaves_no_file(place: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    bad = sample_videos.garble(sample_videos.write(tmp_path / "g.mp4", sample_videos.busy(30)))
    weights = place / "weights.safetensors"
    with pytest.raises(InputError, match=r"g\.mp4"):
        command_line.run("encode", [str(weights), str(bad), str(folder / "z.safetensors")])
    assert not list(folder.iterdir())
    with pytest.raises(InputError, match=r"does not end with \.safetensors"):
        command_line.run("encode", [str(weights), str(place / "clip.mp4"), str(folder / "z.npz")])


LAYOUTS = {  # name of the array, shape for latents [4, 3, 5, 4], axes to [L, h, w, C]
    "ncthw": ("latents", (1, 4, 4, 3, 5), (1, 2, 3, 0)),
    "ntchw": ("latents", (1, 4, 4, 3, 5), (0, 2, 3, 1)),
    "comfyui": ("latent_tensor", (1, 4, 4, 3, 5), (1, 2, 3, 0)),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_other_programs_have_the_same_latents(
    place: Path, layout: str, tmp_path: Path
) -> None:
    suffix = ".latent" if layout == "comfyui" else ".safetensors"
    target = tmp_path / f"z{suffix}"
    scaled = ("--scale", "2,1,0.5,4", "--shift", "0.25")
    typed = (place / "weights.safetensors", place / "clip.mp4", target, "--layout", layout)
    assert run("encode", *typed, *scaled) == 0
    name, shape, axes = LAYOUTS[layout]
    arrays = safetensors.numpy.load_file(target)
    assert arrays.pop(name).shape == shape
    stored = safetensors.numpy.load_file(target)[name][0].transpose(axes)
    plain = safetensors.numpy.load_file(place / "z.safetensors")["latents"]
    expected = plain * np.float32([2, 1, 0.5, 4]) + np.float32(0.25)
    np.testing.assert_allclose(stored, expected, rtol=1e-6)
    # ComfyUI's LoadLatent multiplies by 1 / 0.18215 without this array.
    assert {key: array.shape for key, array in arrays.items()} == (
        {"latent_format_version_0": (0,)} if layout == "comfyui" else {}
    )
    for source, out in ((target, "a.mp4"), (place / "z.safetensors", "b.mp4")):
        assert run("decode", place / "weights.safetensors", source, tmp_path / out) == 0
    found, same = (small_autoencoder.read(tmp_path / out) for out in ("a.mp4", "b.mp4"))
    assert np.abs(found.astype(int) - same).max() <= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--scale", "1,2"), r"--scale has 2 numbers, but the latents have 4 channels: use 1 or 4"),
        (("--shift", "x"), r"--shift x: use numbers such as 0\.5 or 0\.5,0\.25"),
        (("--layout", "comfyui"), r"z\.safetensors does not end with \.latent"),
        (("--workers", "2"), r"--workers 2 is for folders, and .*clip\.mp4 is not one: omit it"),
    ],
)
def test_unusable_flags_of_encode(
    place: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    typed = (place / "weights.safetensors", place / "clip.mp4", tmp_path / "z.safetensors")
    with pytest.raises(InputError, match=message):
        command_line.run("encode", [*map(str, typed), *flags])


def test_a_folder_is_encoded_and_decoded(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, videos = place / "weights.safetensors", tmp_path / "in"
    (videos / "inner").mkdir(parents=True)
    for name in ("a.mp4", "inner/b.mp4"):
        (videos / name).write_bytes((place / "clip.mp4").read_bytes())
    bad = sample_videos.garble(sample_videos.write(tmp_path / "g.mp4", sample_videos.busy(30)))
    bad.rename(videos / "bad.mp4")
    assert run("encode", weights, videos, tmp_path / "z", "--workers", 2) == 1
    printed = capsys.readouterr().out
    assert "2 encoded, 1 failed of 3 files on 2 devices" in printed
    assert "bad.mp4" in printed
    for name in ("a", "inner/b"):
        found = (tmp_path / f"z/{name}.safetensors").read_bytes()
        assert found == (place / "z.safetensors").read_bytes()
    assert run("encode", weights, videos, tmp_path / "z", "--workers", 1) == 1
    assert "2 already done, 1 failed of 3 files" in capsys.readouterr().out
    assert run("decode", weights, tmp_path / "z", tmp_path / "out", "--workers", 1) == 0
    assert run("decode", weights, place / "z.safetensors", tmp_path / "one.mp4") == 0
    for name in ("a", "inner/b"):
        assert (tmp_path / f"out/{name}.mp4").read_bytes() == (tmp_path / "one.mp4").read_bytes()
    with pytest.raises(InputError, match=r"other settings \(crf 16, not 20\)"):
        command_line.run(
            "decode", [*map(str, (weights, tmp_path / "z", tmp_path / "out")), "--crf", "20"]
        )


def test_a_cluster_encodes_and_decodes_the_same(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    videos = tmp_path / "in"
    videos.mkdir()
    images = sample_videos.busy(6, height=16, width=16)
    sample_videos.write(videos / "a.mp4", images)
    sample_videos.write_at(videos / "b.mkv", images, [0, 40, 50, 200, 1000, 1010])
    (videos / "broken.mp4").write_bytes(b"no video")
    cluster, asked = ClusterHere(), list[tuple[object, ...]]()

    def start(*arguments: object) -> ClusterHere:
        asked.append(arguments[:3])
        return cluster

    monkeypatch.setattr(engines, "Ray", start)
    monkeypatch.setattr(resumable, "Ray", ClusterHere)
    made = {}
    for name, flags in (
        ("alone", ()),
        ("cluster", ("--engine", "ray", "--ray-address", "a:1", "--ray-gpus", 0.5)),
    ):
        out = tmp_path / name
        how = (*flags, "--workers", 3)
        source = place / "weights.safetensors"
        assert run("encode", source, videos, out / "z", "--dtype", "float16", *how) == 1
        printed = capsys.readouterr()
        assert "2 encoded, 1 failed of 3 files on" in printed.out
        assert ("on the Ray cluster here;" in printed.out) == (name == "cluster")
        assert "b.mkv has a variable frame rate: only the average" in printed.out
        assert run("decode", source, tmp_path / "alone/z", out / "v", *how) == 0
        made[name] = {
            path.relative_to(out).as_posix(): path.read_bytes()
            for path in out.rglob("*")
            if path.is_file() and ".jobs" not in path.parts
        }
    assert made["cluster"] == made["alone"]
    assert len(made["alone"]) == 6
    assert asked == [("a:1", 3, 0.5)] * 2
    assert len(cluster.items) == 5


@pytest.mark.long
@pytest.mark.parametrize("frames", [1, 5, 6, 17, 22, 23])
def test_h3_gives_as_many_frames_as_went_in(tmp_path: Path, frames: int) -> None:
    weights = small_autoencoder.save(tmp_path / "w.safetensors", trim="h3", frames=5)
    images = sample_videos.busy(frames, height=16, width=24)
    sample_videos.write(tmp_path / "v.mp4", images)
    assert run("encode", weights, tmp_path / "v.mp4", tmp_path / "z.safetensors") == 0
    latents = safetensors.numpy.load_file(tmp_path / "z.safetensors")["latents"]
    count = {1: 2, 5: 2, 6: 7, 17: 7, 22: 7, 23: 12}[frames]
    assert len(latents) == count
    video = np.stack([one.pixels for one in reading.Video(tmp_path / "v.mp4").images()])
    made = small_autoencoder.module(weights)
    filled = np.pad(video, ((0, 17 * (count + 3) // 5 - frames), *[(0, 0)] * 3), mode="edge")
    whole = np.asarray(made.encode(filled[None].astype(np.float32) / 255))[0]
    np.testing.assert_allclose(latents, whole, atol=1e-5)
    assert run("decode", weights, tmp_path / "z.safetensors", tmp_path / "o.mp4") == 0
    assert len(small_autoencoder.read(tmp_path / "o.mp4")) == frames


def test_a_full_disk_ends_the_command(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would process all other files in vain."""
    tried: list[object] = []

    def full(self: object, *_: object) -> None:
        tried.append(self)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    films, latents = tmp_path / "films", tmp_path / "latents"
    for folder, name in ((films, "clip.mp4"), (latents, "z.safetensors")):
        folder.mkdir()
        for number in range(3):
            shutil.copy(place / name, folder / f"{number}{Path(name).suffix}")
    monkeypatch.setattr(tensor_stream.Rows, "add", full)
    monkeypatch.setattr(writing.Writer, "add", full)
    for command, folder in (("encode", films), ("decode", latents)):
        out = tmp_path / command
        assert run(command, place / "weights.safetensors", folder, out, "--workers", 1) == 75
        assert len(tried) == 1
        tried.clear()
        printed = capsys.readouterr().err
        assert re.search(rf"error: {out}/\d\.\w+ cannot be written \(No space left", printed)
        assert "free space on that disk, and start again" in printed


def test_too_many_files_at_once_for_a_device_name_the_fix(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(autoencoder.Autoencoder, "encoded", full)
    films = tmp_path / "films"
    films.mkdir()
    (films / "clip.mp4").write_bytes((place / "clip.mp4").read_bytes())
    arguments = (place / "weights.safetensors", films, tmp_path / "out")
    assert run("encode", *arguments, "--workers", 4) == 1
    printed = capsys.readouterr()
    assert (
        "clip.mp4: 4 files at once filled the memory of a device: repeat the command with "
        "--workers 2 for the files that failed" in printed.out + printed.err
    )
