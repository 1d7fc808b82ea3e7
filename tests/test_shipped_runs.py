"""Shipped configs train for three steps on as many virtual devices as they want GPUs.

Only sizes are overridden: mesh, sharding, precision, data and cadence are the config's own.
"""

from pathlib import Path

import pytest
import sample_videos
from program import records, train, write_corpus
from tensorboard_events import events

pytestmark = pytest.mark.slow

SMALL_CLIPS = (
    *("--model.frames", 4, "--model.height", 16, "--model.width", 16),
    *("--model.encoder_width", 8, "--model.decoder_widths", 16, 8, 8, 8),
    *("--data.batch_size", 32, "--data.workers", 1),
)
SMALL_TEXT = (
    *("--model.hidden", 32, "--model.layers", 2, "--model.heads", 4),
    *("--model.vocab_size", 300, "--model.sequence_length", 32),
    *("--data.batch_size", 64, "--data.workers", 1, "--loop.epochs", None),
)


def three_steps(directory: Path, config: str, devices: int, *overrides: object) -> str:
    return train(
        directory,
        *("--config", config, "--simulate-devices", devices, "--output-dir", "run"),
        *("--loop.steps", 3, "--loop.log_every", 1, *overrides),
    )


@pytest.mark.long
def test_the_video_autoencoder_on_sixteen_devices(tmp_path: Path) -> None:
    for number in range(4):
        sample_videos.write(tmp_path / f"videos/{number}.mp4", 20 + number)
    said = three_steps(
        tmp_path,
        "h100_16",
        16,
        *("--data.path", "videos", "--optim.warmup_steps", "1", *SMALL_CLIPS),
    )
    assert "2 per device x 16 devices x 1 accumulation" in said
    found = records(tmp_path / "run")
    assert sorted(found) == [1, 2, 3]
    assert all(0 < found[step]["train/loss"] < 20 for step in found)  # 20 x the squared error
    assert found[3]["val/psnr"] > 5
    assert (tmp_path / "run/best/3").is_dir()


@pytest.mark.long
def test_the_masked_language_model_on_eight_devices(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    said = three_steps(tmp_path, "mlm_h200_8", 8, "--data.path", str(corpus), *SMALL_TEXT)
    assert "8 per device x 8 devices x 1 accumulation" in said
    found = records(tmp_path / "run")
    assert sorted(found) == [1, 2, 3]
    assert 0 < found[3]["val/loss"] < 7  # log(300) is 5.7
    assert (tmp_path / "run/checkpoints/3/tokenizer.json").is_file()


def test_the_gpt_on_eight_devices_writes_texts(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    said = three_steps(
        tmp_path,
        "demo_gpt",
        8,
        *("--data.path", str(corpus), "--mesh.fsdp", 8, "--mesh.shard", "params"),
        *("--model.depth", 2, "--model.width", 32, "--model.heads", 4, "--model.vocab_size", 300),
        *("--model.sequence_length", 32, "--data.workers", 1, "--mesh.min_shard_elements", 64),
    )
    page = (tmp_path / "run/samples/text_3.txt").read_text()
    assert "samples/text_3.txt" in said
    assert page.count("the text begins\n") == page.count("the model goes on\n") == 2
    begun = page.split("the text begins\n")[1].split("\n=====")[0]
    assert any(begun.removeprefix("<|bos|>")[:20] in file.read_text() for file in corpus.iterdir())
    shown = [value for event in events(tmp_path / "run") for value in event.summary.value]
    assert [value.tag for value in shown if value.HasField("tensor")] == ["text"]
