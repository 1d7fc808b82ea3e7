"""Building the parts of a step from a config."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint import small_checkpoint
from models.wan import wan_weights

from jaxtrain import config, sharding
from jaxtrain.checkpoint import pointer, resume, saver
from jaxtrain.checkpoint.store import Folder
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.config.run_length import Position
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import disks
from jaxtrain.training import (
    first_state,
    rollback,
    save_policy,
    setup,
    step_setup,
)
from jaxtrain.training.run_progress import Criterion, RunProgress
from jaxtrain.training.state import State


def warnings_of_rate(name: str, changes: dict[str, object]) -> list[str]:
    said: list[str] = []
    run = config.named(name).override(changes)
    mesh = sharding.make_mesh(run.mesh, jax.devices()[:1])
    step_setup.build_step_setup(run, mesh, 1000, said.append)
    return [line for line in said if line.startswith("warning") and "optim.peak_lr" in line]


def test_a_rate_that_no_parameter_uses_is_reported() -> None:
    rate: dict[str, object] = {"optim.peak_lr": 3e-4}
    assert warnings_of_rate("demo_gpt", rate) == [
        "warning: optim.peak_lr 0.0003 has no effect, because optim.muon sets the rates of all "
        "parameters: set --optim.muon.peak_lr, --optim.muon.embedding_lr, "
        "--optim.muon.unembedding_lr, --optim.muon.scalar_lr, or --optim.muon None to use AdamW"
    ]
    assert warnings_of_rate("demo_gpt", rate | {"optim.muon": None}) == []
    assert warnings_of_rate("demo_gpt", {"loop.steps": 7}) == []


def test_a_rate_that_is_high_for_the_width_is_reported() -> None:
    wide = {"optim.muon": None, "model.decoder_widths": (256, 128, 64, 64)}
    assert warnings_of_rate("demo", wide) == [
        "warning: --optim.peak_lr 0.001 is high for layers as wide as this model's, and training "
        "may diverge: use at most 0.00039"
    ]
    assert warnings_of_rate("demo", wide | {"optim.peak_lr": 3e-4}) == []
    assert warnings_of_rate("demo", wide | {"optim.muon": config.Muon()}) == []
    assert warnings_of_rate("demo", {}) == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("demo_mlm", {"optim.schedule": "constant", "optim.peak_lr": 0.02}),
        ("demo_gpt", {"optim.muon.peak_lr": 0.1, "optim.muon.momentum": 0.8}),
    ],
)
def test_runs_of_other_lengths_rates_and_decays_have_one_program(
    name: str, changes: dict[str, Any]
) -> None:
    """So it is in the compilation cache: what changes is an argument of the step."""
    run = config.named(name)
    tiny = {"model": type(run.model).tiny(), "mesh.fsdp": 8, "data.batch_size": 16}
    lengths = {"loop.steps": 50, "optim.warmup_steps": 7, "optim.warmup_fraction": None}
    programs = []
    for more in ({}, changes | lengths | {"optim.weight_decay": 0.3}):
        other = run.override(tiny | more)
        built = step_setup.build_without_data(other, sharding.make_mesh(other.mesh))
        programs.append(built.trace_step().lower().as_text())
    assert programs[0] == programs[1]


TAUGHT = (
    *("--model.frames", "4", "--model.height", "16", "--model.width", "16"),
    *("--model.latent_channels", "4", "--model.encoder_width", "4"),
    *("--model.decoder_widths", "4", "4", "4", "4", "--model.init", "random"),
    *("--model.teacher.network", "wan2.1", "--data.batch_size", "4"),
)


def first(folder: Path, start_from: Path | None, devices: int = 1) -> tuple[Any, State, Any]:
    """Returns the setup of a run with a teacher, its first state, and its metadata."""
    typed = [*TAUGHT, "--model.teacher.weights", str(folder), "--mesh.fsdp", str(devices)]
    run = config.load("demo", [*typed, "--mesh.shard", "params"])
    mesh = sharding.make_mesh(run.mesh, jax.devices()[:devices])
    made = step_setup.build_without_data(run, mesh)
    meta = save_policy.describe(run, "fingerprint")
    shown = str(start_from or "").removesuffix(".json")
    state = first_state.first_state(made, None, start_from, meta, lambda line: None, shown=shown)
    return made, state, meta


def save(made: Any, state: State, meta: Any, place: Path) -> Path:
    checkpoints = saver.CheckpointSaver(place, 1, lambda line: None)
    with contextlib.closing(checkpoints):
        file_weights = made.definition.file_weights
        progress = RunProgress(place, Criterion(None, None, ""))
        kept = save_policy.SavePolicy(checkpoints, meta, progress, file_weights=file_weights)
        kept.finish(Position(2, examples_seen=8), state)
    return place / pointer.CHECKPOINTS / "2.json"


def at_step_2(state: State) -> State:
    """Returns a state after two steps, with parameters of its own."""
    params = {name: array + 1 for name, array in state.params.items()}
    two = {"step": state.step + 2, "examples_seen": state.examples_seen + 8}
    return dataclasses.replace(state, params=params, **two)


def same(one: State, other: State) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))


@pytest.mark.slow
def test_weights_of_a_teacher_are_not_saved_but_the_same_ones_are_required(tmp_path: Path) -> None:
    """On other numbers of devices, and in a rollback."""
    folder, other = (
        wan_weights.write(tmp_path / name, wan_weights.NARROW["wan2.1"], seed)
        for seed, name in enumerate(("vae", "other"))
    )
    made, state, meta = first(folder, None)
    state = at_step_2(state)
    taught = set(made.definition.file_weights)
    assert all(name.startswith("teacher_network.") for name in taught)
    assert np.asarray(state.extras["teacher_network.encoder.conv_in.kernel"]).any()
    path = save(made, state, meta, tmp_path / "run")
    names = pointer.read_shapes(path)
    assert {name.partition(".")[0] for name in names} >= {"params", "opt"}
    assert not [name for name in names if "teacher_network" in name]
    found, resumed, _ = first(folder, path, devices=2)
    same(resumed, state)
    where = jax.tree.map(lambda leaf: leaf.sharding, (resumed, found.target))
    assert where[0] == where[1]
    changed = dataclasses.replace(state, extras={n: a + 1 for n, a in state.extras.items()})
    back = rollback.Rollback(tmp_path / "run", 2, made.saved, lambda line: None, str)
    # A rollback deletes the arrays of the state that it replaces.
    restored, _ = back(dataclasses.replace(jax.tree.map(jnp.copy, changed), params={}))
    same(restored, dataclasses.replace(changed, params=state.params))
    with pytest.raises(
        InputError,
        match=r"checkpoints/2 was trained with other values of teacher_network \(checksum \w{8}\) "
        r"than this config's files have \(\w{8}\): pass the files",
    ):
        first(other, path)


def test_all_processes_resume_from_what_process_0_has_chosen_at_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live run may save another checkpoint before the others look for the newest."""
    path = small_checkpoint.write(tmp_path / "cache", 4)
    newest, chosen = "s3://bucket/run", "s3://bucket/run/checkpoints/4"
    fetched: list[str] = []

    def fetch(url: str, *_: object) -> tuple[Path, str]:
        fetched.append(url)
        return path, chosen

    monkeypatch.setattr(resume, "checkpoint_at_url", fetch)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "caches"))
    (tmp_path / "run").mkdir()
    run, flags = config.load("demo_mlm"), RunFlags(resume=newest)
    log: Any = SimpleNamespace(say=print, log=print)
    answers: list[str] = []

    def remember(decide: Callable[[], str]) -> str:
        answers.append(decide())
        return answers[-1]

    monkeypatch.setattr(process_group, "process_zero_decides", remember)
    place = Folder(tmp_path / "run")
    first = setup._open_start(run, flags, tmp_path / "run", place, None, log)
    assert (first.path, first.display_path) == (path, chosen)
    monkeypatch.setattr(process_group, "process_zero_decides", lambda decide: answers[0])
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert setup._open_start(run, flags, tmp_path / "run", place, None, log) == first
    assert fetched == [newest, chosen]


def test_a_disk_without_room_for_a_checkpoint_ends_a_new_run_before_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume may make room: its save deletes an older checkpoint."""
    built: Any = SimpleNamespace(saved={"w": jax.ShapeDtypeStruct((1000, 3), jnp.float32)})
    directory: Any = SimpleNamespace(resumes=False, uploader=None, path=tmp_path)
    free = {"bytes": 12_000}
    monkeypatch.setattr(disks, "free_bytes", lambda folder: free["bytes"])
    setup._check_room(built, directory)
    free["bytes"] = 11_999
    message = r"a checkpoint of this run needs 12,000 bytes, but only 11,999 are free in .*: free"
    with pytest.raises(RunAgain, match=message):
        setup._check_room(built, directory)
    directory.resumes = True
    setup._check_room(built, directory)
