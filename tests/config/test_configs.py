"""The shipped configs: their values and help, and that jaxtrain reads every field."""

import ast
import dataclasses
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from jaxtrain import config, main
from jaxtrain.cli import help
from jaxtrain.config import field_values, files, overrides

VIDEO = ("h100_1", "h100_8", "h100_16", "h100_48", "h100_64", "a800_8")

# Copied by hand from the tables that the configs implement: per-device batch size, accumulation,
# global batch size; data, fsdp, shard; prefetch. The workers in the tables are per GPU, and
# ours depend on the host.
LAYOUT = {
    "h100_1": ((8, 16, 128), (1, 1, "optimizer"), 2),
    "h100_8": ((8, 2, 128), (1, 8, "optimizer"), 2),
    "h100_16": ((8, 1, 128), (1, 16, "params"), 3),
    "h100_48": ((5, 1, 240), (6, 8, "params"), 3),
    "h100_64": ((4, 1, 256), (8, 8, "params"), 4),
    "a800_8": ((2, 8, 128), (1, 8, "optimizer"), 2),
    "taehv_h100_1": ((16, 1, 16), (1, 1, "optimizer"), 2),
    "taew2_2_h100_1": ((16, 1, 16), (1, 1, "optimizer"), 2),
    "wan2_2_decoder_h100_1": ((1, 32, 32), (1, 1, "optimizer"), 2),
    "wan2_2_decoder_h100_8": ((2, 2, 32), (1, 8, "optimizer"), 2),
    "mlm_h200_8": ((96, 1, 768), (1, 8, "optimizer"), 2),
    "mlm_a10_8": ((96, 1, 768), (1, 8, "optimizer"), 2),
    "bert_base_h200_8": ((32, 1, 256), (1, 8, "optimizer"), 2),
    "bert_large_h200_8": ((32, 1, 256), (1, 8, "optimizer"), 2),
    "ettin_150m_h100_8": ((64, 9, 4608), (1, 8, "optimizer"), 2),
    "gpt_32gb_conservative": ((8, 2, 16), (1, 1, "optimizer"), 2),
    "gpt_32gb_medium": ((12, 2, 24), (1, 1, "optimizer"), 2),
    "gpt_32gb_high": ((7, 4, 28), (1, 1, "optimizer"), 2),
    "gpt_h200_1": ((64, 4, 256), (1, 1, "optimizer"), 2),
    "gpt_h100_8": ((16, 2, 256), (1, 8, "params"), 2),
    "gpt_2026_h100_1": ((64, 4, 256), (1, 1, "optimizer"), 2),
    "gpt_2026_h100_8": ((16, 4, 512), (1, 8, "optimizer"), 2),
    "a6000_medium": ((32, 4, 128), (1, 1, "optimizer"), 4),
}
# Steps, peak learning rate, warmup; log, eval, save, keep; eval clips, hang timeout.
VIDEO_LENGTHS = {
    "h100_1": ((100_000, 1e-4, 2000), (50, 1000, 2000, 100), (256, 1800)),
    "h100_8": ((100_000, 1e-4, 2000), (25, 1000, 2000, 100), (256, 3600)),
    "h100_16": ((100_000, 1e-4, 1500), (20, 500, 1000, 100), (256, 7200)),
    "h100_48": ((100_000, 1.4e-4, 1200), (15, 500, 750, 100), (256, 10800)),
    "h100_64": ((100_000, 1.4e-4, 1000), (10, 500, 500, 100), (256, 14400)),
    "a800_8": ((100_000, 1e-4, 2000), (25, 1000, 1000, 5), (256, 3600)),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, config.Run]:
    return {name: config.load(name) for name in files.names()}


@pytest.mark.parametrize("name", LAYOUT)
def test_batch_mesh_and_loader(runs: dict[str, config.Run], name: str) -> None:
    run = runs[name]
    (each, accumulate, batch), mesh, prefetch = LAYOUT[name]
    assert (run.optim.accumulate, run.data.batch_size) == (accumulate, batch)
    assert (run.mesh.data, run.mesh.fsdp, run.mesh.shard) == mesh
    assert each * run.mesh.data * run.mesh.fsdp * accumulate == batch
    assert (run.data.workers, run.data.prefetch) == (None, prefetch)
    assert run.data.path is None
    assert run.data.demo is False
    assert run.precision == "bfloat16"


@pytest.mark.parametrize("name", VIDEO)
def test_video_configs(runs: dict[str, config.Run], name: str) -> None:
    run = runs[name]
    length, cadence, validation = VIDEO_LENGTHS[name]
    optim, loop, checkpoint = run.optim, run.loop, run.checkpoint
    assert (loop.steps, optim.peak_lr, optim.warmup_steps) == length
    assert (loop.log_every, loop.eval_every, checkpoint.every, checkpoint.keep) == cadence
    assert (loop.eval_examples, loop.hang_timeout_s) == validation
    assert (optim.schedule, optim.b1, optim.b2, optim.eps) == ("cosine", 0.9, 0.95, 1e-8)
    assert (optim.weight_decay, optim.max_grad_norm, run.seed) == (1e-2, 1.0, 42)
    assert (checkpoint.best_metric, config.best_mode(run)) == ("val/psnr", "max")
    model, data = run.model, run.data
    frames = 17 if name == "h100_1" else 13
    assert (model.frames, model.height, model.width) == (frames, 480, 720)
    assert (model.latent_channels, model.encoder_width) == (16, 64)
    assert model.decoder_widths == (256, 128, 64, 64)
    assert model.remat == "none"
    assert model.reconstruction_weight == 20
    assert model.notes() == [], "the loss compares every frame"
    assert (data.max_frame_delta, data.train_split) == (2, 0.95)
    assert data.flip


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("gpt_32gb_conservative", 24_576),
        ("gpt_32gb_medium", 49_152),
        ("gpt_32gb_high", 86_016),
        ("gpt_h200_1", 2**19),
        ("gpt_h100_8", 2**19),
    ],
)
def test_rates_fit_the_tokens_per_step(runs: dict[str, config.Run], name: str, tokens: int) -> None:
    """nanochat's rates are for 2^19 tokens, and grow with the root of their number."""
    run = runs[name]
    assert run.data.batch_size * run.model.sequence_length == tokens
    muon, scale = run.optim.muon, (tokens / 2**19) ** 0.5
    rates = (muon.peak_lr, muon.embedding_lr, muon.unembedding_lr)
    assert rates == pytest.approx([0.02 * scale, 0.2 * scale, 0.004 * scale])


def test_videos_are_validated_on_enough_clips(runs: dict[str, config.Run]) -> None:
    for name, run in runs.items():
        if "video" in run.model.batch_spec(1) and not name.startswith("demo"):
            assert run.loop.eval_examples >= 200, name


def test_each_docstring_names_its_guide_and_what_a_specialist_would_change(
    checkout: Path,
) -> None:
    for name in files.names():
        text = " ".join(files.docstring(name).split())
        guides = re.findall(r"docs/[\w/.-]+\.md", text)
        assert guides, name
        assert all((checkout / guide).is_file() for guide in guides), name
        assert "specialist would" in text, name
        for named in re.findall(r"what `(\w+)` names", text):
            assert "specialist would" in files.docstring(named), name
        for changes in re.findall(r"`(--[\w.]+ [^`]+)`", text):
            config.load(name, changes.split())


def optional_section(annotation: Any) -> bool:
    return any(dataclasses.is_dataclass(choice) for choice in typing.get_args(annotation))


def test_help_of_each_config_lists_each_field(
    runs: dict[str, config.Run], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, run in runs.items():
        assert main.main(["--config", name, "--help", "all"]) == 0
        text = capsys.readouterr().out
        assert "``" not in text, name
        off = [one.name for one in help.sections(run) if one.value is None]
        for leaf in overrides.leaves(run):
            if not optional_section(leaf.annotation):
                assert f"--{leaf.name} " in text, (name, leaf.name)
        for one in off:
            assert f"{one} is off; its fields: --help {one}" in text
        assert main.main(["--config", name, "--help", *off]) == 0
        text = capsys.readouterr().out
        for section in ("teacher.decode", "perceptual.weights", "adversary.replay"):
            assert (f"--model.{section} " in text) == (f"model.{section.split('.')[0]}" in off)


def test_each_value_is_the_same_when_it_is_typed(runs: dict[str, config.Run]) -> None:
    for name, run in runs.items():
        leaves = list(overrides.leaves(run))
        for leaf in leaves:
            typed = field_values.parse(field_values.as_arguments(leaf.value), leaf.annotation)
            assert typed == leaf.value, (name, leaf.name)
        typed_all = [
            word
            for one in leaves
            for word in (f"--{one.name}", *field_values.as_arguments(one.value))
        ]
        assert overrides.apply(run, typed_all) == run, name


def attributes_read(tree: ast.AST) -> set[str]:
    """Returns the names of attributes that code reads, except only to check or report them."""
    names = set[str]()
    for node in ast.iter_child_nodes(tree):
        function = node.name if isinstance(node, ast.FunctionDef) else ""
        if isinstance(node, ast.Raise) or re.match("problems$|_?check|__post_init__$", function):
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names.add(node.attr)
        names |= attributes_read(node)
    return names


def test_every_field_is_read(runs: dict[str, config.Run], checkout: Path) -> None:
    paths = (checkout / "jaxtrain").rglob("*.py")
    read = set[str]().union(*(attributes_read(ast.parse(path.read_text())) for path in paths))
    fields = {
        leaf.name.rpartition(".")[2] for run in runs.values() for leaf in overrides.leaves(run)
    }
    assert fields - read == set(), "config fields that no code reads: wire or drop"
    assert "unused" not in attributes_read(ast.parse("def problems(self):\n    return self.unused"))
