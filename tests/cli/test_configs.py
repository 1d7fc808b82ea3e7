"""``jaxtrain configs``: list, show and diff."""

import pytest

from jaxtrain import config
from jaxtrain.cli import command_line
from jaxtrain.config import files


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command_line.run("configs", list(arguments)) == 0
    return capsys.readouterr().out


def test_list_describes_each_config(capsys: pytest.CaptureFixture[str]) -> None:
    lines = out(capsys, "list").splitlines()
    assert [line.split()[0] for line in lines] == files.names()
    assert next(line for line in lines if line.startswith("h100_16 ")).endswith(
        "Video autoencoder, 13x480x720, on two nodes of 8 H100 (80 GB)."
    )


def test_show_prints_all_values(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "show", "h100_16", "--optim.peak_lr", "3e-4")
    assert "jaxtrain train h100_16" in text
    shown = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert shown["optim.peak_lr"] == ["0.0003"]
    assert shown["mesh.shard"] == ["params"]
    assert shown["model.decoder_widths"] == ["256", "128", "64", "64"]
    assert shown["data.path"] == ["None"]


def test_the_output_of_show_works_as_flags(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "show", "bert_base_h200_8")
    fields = text.partition("\nname ")[2].splitlines()[1:]
    assert len(fields) > 40
    typed = [word for line in fields for word in (f"--{line.split()[0]}", *line.split()[1:])]
    same = config.load("mlm_h200_8", ["--name", "bert_base_h200_8", *typed])
    assert same == config.load("bert_base_h200_8")


def test_diff_prints_only_the_differences(capsys: pytest.CaptureFixture[str]) -> None:
    text = out(capsys, "diff", "h100_48", "h100_64")
    assert text.splitlines() == [
        "data.batch_size: 240 -> 256",
        "data.prefetch: 3 -> 4",
        "optim.warmup_steps: 1200 -> 1000",
        "mesh.data: 6 -> 8",
        "loop.log_every: 15 -> 10",
        "loop.hang_timeout_s: 10800.0 -> 14400.0",
        "checkpoint.every: 750 -> 500",
    ]
    assert (
        out(capsys, "diff", "mlm_h200_8", "mlm_a10_8") == "mlm_h200_8 and mlm_a10_8 are the same\n"
    )
