"""A student against its teacher: each planted fault shows in its own cell."""

import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from inference import taesd_weights
from models.video_ae import small_autoencoder

from jaxtrain.errors import InputError
from jaxtrain.inference import taesd_network, teachers
from jaxtrain.inference.evaluation import distillation, reconstructions
from jaxtrain.inference.evaluation.distillation import AGAINST_TEACHER, StudentMetrics
from jaxtrain.inference.video.autoencoder import Autoencoder
from jaxtrain.interop import weights
from jaxtrain.models import wan_vae
from jaxtrain.models.reconstruction.timing import Timing

MODEL = small_autoencoder.config()
FRAMES, HEIGHT, WIDTH = 8, 48, 48


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> teachers.Teacher:
    path = small_autoencoder.save(tmp_path_factory.mktemp("teacher") / "0.safetensors")
    return teachers.load(str(path), scaling=None, say=lambda line: None, command="evaluate")


def measured(
    teacher: teachers.Teacher, folder: Path, *, gray: bool = False, **changed: np.ndarray
) -> tuple[StudentMetrics, distillation.Latents]:
    """Measures a student that has the teacher's weights but these."""
    params = small_autoencoder.params(MODEL)
    params |= {name.replace("__", "."): array for name, array in changed.items()}
    weights.save(folder / "student.safetensors", MODEL, params)
    meter = distillation.StudentMeter(
        Autoencoder(folder / "student.safetensors"),
        teacher,
        dict(list(reconstructions.MEASURES.items())[:2]),
        frames=FRAMES,
        height=HEIGHT,
        width=WIDTH,
    )
    clip: Any = types.SimpleNamespace(frame_range=types.SimpleNamespace(name="a.mp4"), place=0.5)
    shape = (FRAMES, HEIGHT, WIDTH, 3)
    video = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    result = meter.result_of(clip, video[..., :1].repeat(3, -1) if gray else video)
    meter._features[0].append(result.features[0])
    assert isinstance(result.measured, StudentMetrics)
    return result.measured, meter.latents()


def of_cells(metrics: StudentMetrics, name: str) -> list[float]:
    return [cell[name] for cell in metrics.values]


def test_each_fault_is_in_its_cell(teacher: teachers.Teacher, tmp_path: Path) -> None:
    params = small_autoencoder.params(MODEL)
    same, latents = measured(teacher, tmp_path)
    for name in same.values[0]:
        assert of_cells(same, name) == pytest.approx([same.values[0][name]] * 4, rel=1e-4), name
    assert min(of_cells(same, f"{AGAINST_TEACHER}ssim")) > 0.9999
    np.testing.assert_allclose(latents.slope, 1, atol=1e-4)
    assert same.alone[1]["latents: cosine"] == pytest.approx(1)
    for sigma in distillation.NOISE:
        assert same.alone[1][f"noise {sigma:g}: ssim to teacher"] == pytest.approx(1)
    assert {"24x24: psnr", "24x24: saturation"} <= same.alone[0].keys()

    tail = {name: params[f"encoder.tail.{name}"] for name in ("kernel", "bias")}
    order = [1, 0, 2, 3]
    swapped = {f"encoder__tail__{name}": array[..., order] for name, array in tail.items()}
    found, latents = measured(teacher, tmp_path, **swapped)
    to_teacher = of_cells(found, f"{AGAINST_TEACHER}psnr")
    assert to_teacher[2] > 60 > 40 > max(to_teacher[1], to_teacher[3])
    assert (np.abs(latents.correlation - 1) < 1e-4).tolist() == [False, False, True, True]

    scaled = {f"encoder__tail__{name}": array * 1.05 for name, array in tail.items()}
    found, latents = measured(teacher, tmp_path, **scaled)
    np.testing.assert_allclose(latents.slope, 1.05, rtol=1e-4)
    np.testing.assert_allclose(latents.correlation, 1, atol=1e-5)

    colorful = 1.05 * np.eye(3) - 0.05 / 3
    kernel = (params["decoder.tail.kernel"] @ colorful).astype(np.float32)
    bias = (params["decoder.tail.bias"] @ colorful).astype(np.float32)
    changed = {"decoder__tail__kernel": kernel, "decoder__tail__bias": bias}
    found, latents = measured(teacher, tmp_path, **changed)
    colors = of_cells(found, "saturation")
    assert colors[1] == pytest.approx(colors[0], rel=1e-4)
    assert 1.02 < colors[2] / colors[0] <= 1.05
    np.testing.assert_allclose(latents.slope, 1, atol=1e-4)


def test_a_gray_clip_has_no_saturation(teacher: teachers.Teacher, tmp_path: Path) -> None:
    metrics, _ = measured(teacher, tmp_path, gray=True)
    for column in (*metrics.values, *metrics.alone):
        assert column
        assert not [name for name, value in column.items() if np.isnan(value)]
        assert not [name for name in column if "saturation" in name]


def test_a_shifted_frame_and_a_blurred_border_show() -> None:
    video = jnp.asarray(np.random.default_rng(0).random((1, 9, 32, 32, 3), np.float32))
    measures = distillation.by_place(Timing(), 3, 9)

    def of(other: Any) -> dict[str, float]:
        return {name: float(np.mean(measure(video, other))) for name, measure in measures.items()}

    groups = ["motion error, frame 1 of 4", "motion error, frame 3 of 4"]
    third = of(video.at[:, 3].set(video[:, 2]))  # frames 1 to 4 are of the second latent
    assert third["motion error, frame 2 of 4"] == pytest.approx(0, abs=1e-5)
    assert third[groups[1]] > 10
    assert third["psnr, frame 3 of 4"] < third["psnr, frame 2 of 4"] == 100
    assert third["psnr, first frame"] == 100
    blurred = of(video.at[:, :, :4].set(0.5))
    assert blurred["psnr, border"] < 20 < blurred["psnr, center"] == 100


def test_positions_within_the_frames_of_a_latent() -> None:
    assert distillation.positions(Timing(), 2) == [3, 0, 1, 2, 3]
    assert distillation.positions(Timing(trim="odd_latents"), 2) == [0, 1, 2, 3] * 2
    assert distillation.positions(Timing(factor=1), 3) == [0] * 3
    assert distillation.positions(wan_vae.CausalTiming(), 2) == [0, 0, 1, 2, 3]
    for timing, latents in ((Timing(trim="h3"), 7), (Timing(factor=8), 3)):
        assert len(distillation.positions(timing, latents)) == timing.decoded(latents)


def test_taesd_is_a_teacher_of_each_frame(tmp_path: Path) -> None:
    said: list[str] = []
    settings: Any = {"say": said.append, "command": "evaluate"}
    loaded = teachers.load(str(taesd_weights.write(tmp_path)), scaling=2.0, **settings)
    assert "tiny_encoder.safetensors and tiny_decoder.safetensors" in said[0]
    video = np.random.default_rng(0).random((2, 3, 16, 24, 3), np.float32)
    latents = loaded.encode(video)
    assert latents.shape == (2, 3, 2, 3, 4)
    assert loaded.decode(latents).shape == video.shape
    np.testing.assert_allclose(loaded.encode(video[:, 1:2]), latents[:, 1:2], atol=1e-5)
    halved = teachers.load(str(tmp_path), scaling=None, **settings)
    np.testing.assert_allclose(2 * halved.encode(video), latents, atol=1e-5)
    np.testing.assert_allclose(halved.decode(latents / 2), loaded.decode(latents), atol=1e-5)
    frames = small_autoencoder.config(time_downscale=(False,) * 3)
    loaded.check("--teacher tiny", frames, 3, "--frames")
    with pytest.raises(InputError, match=r"set --model.time_downscale False False False$"):
        loaded.check("--teacher tiny", MODEL, 3, "--frames")
    for changed, message in (
        (
            {"20.weight": np.zeros((8, 3, 3, 3), np.float32)},
            r"do not have one autoencoder of TAESD",
        ),
        (
            {"a.weight": np.zeros(3, np.float32)},
            r"does not have weights of TAESD, but an array a\.",
        ),
    ):
        with pytest.raises(InputError, match=message):
            taesd_network.read(
                taesd_network.files_of(taesd_weights.write(tmp_path, **changed)) or {}
            )


def test_another_number_of_frames_is_proposed(teacher: teachers.Teacher) -> None:
    timing = wan_vae.CausalTiming()
    assert [teacher.nearest_fitting(timing, frames) for frames in (13, 16, 18)] == [13, 17, 17]
    wan = wan_vae.Config(frames=13, height=16, width=16, latent_channels=4, version="wan2.1")
    with pytest.raises(
        InputError,
        match=r"the model video_ae makes 4 latents of frames=16 frames, which cover 13, but the "
        r"model's 5 cover 17 \(model.trim\): use --frames 17$",
    ):
        teacher.check("--teacher 0.safetensors", wan, 16, "--frames")
