"""Compiled programs are saved, loaded where they match, and refused where anything differs."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import program
import pytest
from jax.experimental.compilation_cache import compilation_cache
from program import TINY_MLM, write_corpus

from jaxtrain import config, sharding
from jaxtrain.errors import InputError
from jaxtrain.training import saved_programs, setup
from jaxtrain.training.saved_programs import Mismatch

OVERRIDES = [*TINY_MLM[2:], "--mesh.fsdp", "8", "--loop.steps", "20"]


def built(*more: str) -> setup.StepSetup:
    run = config.load("demo_mlm", [*OVERRIDES, *more])
    return setup.build_without_data(run, sharding.make_mesh(run.mesh))


def dependencies(parts: setup.StepSetup, processes: int = 1, donate: bool = True) -> dict[str, str]:
    devices = list(parts.rule.mesh.devices.flat)
    return saved_programs.dependencies(parts.run, parts.total, devices, processes, donate=donate)


def saved(folder: Path, parts: setup.StepSetup) -> Path:
    step = parts.compile_step()
    _, metrics = step.out_info
    programs = {"init": parts.jit_init().lower().compile(), "step": step}
    saved_programs.save(folder, programs, list(metrics), dependencies(parts))
    return folder


def loading(folder: Path, parts: setup.StepSetup) -> saved_programs.SavedPrograms:
    devices = list(parts.rule.mesh.devices.flat)
    return saved_programs.SavedPrograms(folder, dependencies(parts), devices)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # A program that came out of the compilation cache cannot be saved (saved_programs.save).
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield saved(tmp_path_factory.mktemp("saved") / "programs", built())
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def batch(parts: setup.StepSetup) -> dict[str, jax.Array]:
    where = sharding.batch_sharding(parts.rule.mesh)
    return {
        name: jax.device_put(np.ones(array.shape, array.dtype), where)
        for name, array in parts.spec.items()
    }


@pytest.mark.long
def test_loaded_programs_compute_what_compiled_ones_do(folder: Path) -> None:
    parts = built()
    programs = loading(folder, parts)
    fast = dataclasses.replace(parts, saved_init=programs.init(parts.target))
    step = programs.step(parts.target, parts.spec)
    own, same = parts.fresh_state(), fast.fresh_state()
    for left, right in zip(jax.tree.leaves(own), jax.tree.leaves(same), strict=True):
        assert left.sharding == right.sharding
        np.testing.assert_array_equal(left, right)
    assert step.in_tree == jax.tree.structure(((parts.target, parts.spec), {}))
    own, expected = parts.compile_step()(own, batch(parts))
    same, metrics = step(same, batch(parts))
    assert set(metrics) == set(expected)
    for name in expected:
        np.testing.assert_array_equal(metrics[name], expected[name], err_msg=name)
    np.testing.assert_array_equal(own.step, same.step)
    assert step.memory_analysis().argument_size_in_bytes > 0  # a run reports its memory


FIELDS = (
    "--seed 7",
    "--precision bfloat16",
    "--deterministic True",
    "--model.ff 128",
    "--model.heads 4",
    "--model.dropout 0.2",
    "--optim.peak_lr 2e-2",
    "--optim.schedule cosine",
    "--optim.b2 0.9",
    "--optim.weight_decay 0.02",
    "--optim.max_grad_norm 2",
    "--optim.bad_norm 30",
    "--data.batch_size 16",
    "--mesh.shard params",
    "--mesh.min_shard_elements 32",
    "--loop.steps 21",
)


@pytest.mark.parametrize("change", FIELDS)
def test_another_config_is_refused(folder: Path, change: str) -> None:
    name = change.split()[0].removeprefix("--").replace("loop.steps", "number of steps")
    with pytest.raises(Mismatch, match=rf"^{re.escape(name)} is .* there and .* here$"):
        loading(folder, built(*change.split()))


def test_another_mesh_is_refused(folder: Path) -> None:
    with pytest.raises(Mismatch, match=r"^mesh.data is 1 there and 2 here$"):
        loading(folder, built("--mesh.fsdp", "4", "--mesh.data", "2"))


def changed_xla_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")


def changed_version(package: str) -> Callable[[pytest.MonkeyPatch], None]:
    def change(monkeypatch: pytest.MonkeyPatch) -> None:
        version = saved_programs.metadata.version
        monkeypatch.setattr(
            saved_programs.metadata,
            "version",
            lambda name: "0.0.1" if name == package else version(name),
        )

    return change


def changed_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_programs, "_PACKAGE", Path(__file__).parent)


def changed_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_programs, "_processor", lambda: "aarch64 0")


def changed_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_programs.platform, "python_version", lambda: "3.99.0")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (changed_xla_flags, "XLA_FLAGS"),
        (changed_version("jax"), "jax"),
        (changed_version("jaxlib"), "jaxlib"),
        (changed_version("flax"), "flax"),
        (changed_version("optax"), "optax"),
        (changed_code, "jaxtrain's code"),
        (changed_processor, "processor"),
        (changed_python, "Python"),
    ],
)
def test_another_environment_is_refused(
    folder: Path,
    change: Callable[[pytest.MonkeyPatch], None],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = built()
    change(monkeypatch)
    with pytest.raises(Mismatch, match=rf"^{re.escape(named)} is .* there and .* here$"):
        loading(folder, parts)


def test_another_setting_of_jax_is_refused() -> None:
    others = {
        "jax_default_matmul_precision": "highest",
        "jax_default_prng_impl": "rbg",
        "jax_disable_most_optimizations": True,
        "jax_enable_x64": True,
        "jax_numpy_dtype_promotion": "strict",
        "jax_threefry_partitionable": False,
        "jax_use_shardy_partitioner": False,
    }
    assert others.keys() == set(saved_programs._JAX_SETTINGS)
    parts = built()
    before = dependencies(parts)
    for name, value in others.items():
        kept = jax.config.values[name]
        jax.config.update(name, value)
        try:
            found = saved_programs.difference(before, dependencies(parts))
        finally:
            jax.config.update(name, kept)
        assert found is not None, name
        assert found.startswith(f"{name} is "), found


@pytest.mark.parametrize(
    ("here", "named"),
    [
        ({"processes": 2}, "number of processes"),
        ({"donate": False}, "buffer donation"),
    ],
)
def test_another_way_to_start_is_refused(folder: Path, here: dict[str, Any], named: str) -> None:
    written = json.loads((folder / saved_programs.INDEX).read_text())["depends_on"]
    found = saved_programs.difference(written, dependencies(built(), **here))
    assert found is not None
    assert found.startswith(f"{named} is ")


def test_the_arrays_of_a_batch_count() -> None:
    """Whether they are planes depends on the folder, and their size on the crops."""

    def of(*typed: str) -> dict[str, str]:
        run = config.load("demo", list(typed))
        return saved_programs.dependencies(run, 1, jax.devices()[:1], 1)

    host, device = of(), of("--data.convert_on", "device")
    smaller = of("--data.convert_on", "device", "--data.min_crop_scale", "0.5")
    for one, other in ((host, device), (device, smaller)):
        found = saved_programs.difference(one, other)
        assert found is not None
        assert found.startswith("batch is "), found
    assert saved_programs.difference(host, of("--data.min_crop_scale", "0.5")) is None


def test_the_code_of_an_own_model_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_model.py").write_text("import own_layers\nclass Config: pass\n")
    (tmp_path / "own_layers.py").write_text("WIDTH = 1\n")
    import own_model  # type: ignore[import-not-found]

    before = saved_programs._own_code(own_model.Config)
    assert before == saved_programs._own_code(own_model.Config)
    installed = tmp_path / ".venv" / "site-packages" / "own_installed.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    monkeypatch.syspath_prepend(installed.parent)
    import own_installed  # type: ignore[import-not-found]  # noqa: F401

    assert saved_programs._own_code(own_model.Config) == before
    (tmp_path / "own_layers.py").write_text("WIDTH = 2\n")
    assert saved_programs._own_code(own_model.Config) != before


def test_damage_is_found(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    content = bytearray((copy / "step.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (copy / "step.bin").write_bytes(content)
    with pytest.raises(InputError, match=r"step\.bin is damaged: write the folder again"):
        loading(copy, built())
    (copy / "step.bin").unlink()
    with pytest.raises(InputError, match=r"step\.bin cannot be read"):
        loading(copy, built())
    index = (folder / saved_programs.INDEX).read_text()
    wrong = index.replace('"arguments": ', '"arguments": -')
    for text in (
        "{",
        "[]",
        wrong,
        '{"programs": {}}',
        '{"depends_on": 1, "metrics": [], "programs": 2}',
    ):
        (copy / saved_programs.INDEX).write_text(text)
        with pytest.raises(InputError, match=r"programs\.json is damaged"):
            loading(copy, built())
    (copy / saved_programs.INDEX).unlink()
    with pytest.raises(InputError, match=r"has no programs\.json: write it with .* plan --config"):
        loading(copy, built())


def altered(folder: Path, copy: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a folder, with another index and a step that jax cannot load."""
    copy.mkdir()
    index = json.loads((folder / saved_programs.INDEX).read_text())
    broken = b"not a program"
    index["programs"]["step"]["sha256"] = hashlib.sha256(broken).hexdigest()
    change(index)
    (copy / "init.bin").write_bytes((folder / "init.bin").read_bytes())
    (copy / "step.bin").write_bytes(broken)
    (copy / saved_programs.INDEX).write_text(json.dumps(index))
    return copy


def test_a_program_that_jax_cannot_load_is_a_mismatch(folder: Path, tmp_path: Path) -> None:
    parts = built()
    copy = altered(folder, tmp_path / "copy", lambda index: None)
    programs = loading(copy, parts)  # the error is in a thread
    programs.init(parts.target)
    with pytest.raises(Mismatch, match=r"^jax cannot load step\.bin here \(.+\)$"):
        programs.step(parts.target, parts.spec)
    programs.close()
    fewer = altered(
        folder, tmp_path / "fewer", lambda index: index["programs"]["init"].update(arguments=3)
    )
    with pytest.raises(Mismatch, match=r"^jax cannot load init\.bin here \(.+\)$"):
        loading(fewer, parts).init(parts.target)


def test_nothing_is_unpickled_before_everything_matches(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(saved_programs, "_deserialized", lambda *_: opened.append("program"))
    copy = altered(folder, tmp_path / "copy", lambda index: index["depends_on"].update(jax="0"))
    with pytest.raises(Mismatch, match=r"^jax is 0 there"):
        loading(copy, built())
    (copy / "step.bin").write_bytes(b"damaged")
    (copy / saved_programs.INDEX).write_bytes((folder / saved_programs.INDEX).read_bytes())
    with pytest.raises(InputError, match=r"step\.bin is damaged"):
        loading(copy, built())
    assert not opened


def test_only_a_folder_of_programs_is_replaced(folder: Path, tmp_path: Path) -> None:
    saved_programs.check_writable(folder)
    saved_programs.check_writable(tmp_path / "new")
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"contains other files, such as thesis\.txt"):
        saved_programs.check_writable(tmp_path)
    with pytest.raises(InputError, match=r"is a file"):
        saved_programs.check_writable(tmp_path / "thesis.txt")
    with pytest.raises(InputError, match=r"is not a folder: create it first"):
        saved_programs.check_writable(tmp_path / "no" / "such")


@pytest.mark.long
def test_a_run_with_saved_programs_compiles_nothing(tmp_path: Path) -> None:
    data = ["--data.path", str(write_corpus(tmp_path)), "--loop.steps", "3"]
    again = {"JAX_LOG_COMPILES": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    plan = [*TINY_MLM[1:], *data, "--simulate-devices", "1", "--save", "programs"]
    saving = program.run(tmp_path, "plan", "--config", *plan)
    assert saving.returncode == 0, saving.stderr
    assert "compiled programs saved in programs" in saving.stdout

    run = [*TINY_MLM, *data]
    fast = program.run(tmp_path, *run, "--compiled", "programs", "--output-dir", "a", **again)
    assert fast.returncode == 0, fast.stderr
    line = r"^compiled programs loaded from programs in [\d.]+ s, of which the run waited [\d.]+ s$"
    assert re.search(line, fast.stdout, re.M)
    assert "compiled in" not in fast.stdout
    assert "Finished XLA compilation" not in fast.stderr
    slow = program.run(tmp_path, *run, "--output-dir", "b", **again)
    assert "Finished XLA compilation" in slow.stderr  # the log works
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert len(losses(tmp_path / "a")) == 3

    other = program.run(
        tmp_path, *run, "--seed", "5", "--compiled", "programs", "--output-dir", "c"
    )
    assert other.returncode == 0, other.stderr
    expected = "--compiled programs does not match this run, so the step is compiled: seed is 42 "
    assert expected in other.stdout


def losses(directory: Path) -> list[float]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines]


def test_a_folder_without_programs_is_refused_before_anything_starts(tmp_path: Path) -> None:
    wrong = program.run(tmp_path, *TINY_MLM, "--loop.steps", "3", "--compiled", "nowhere")
    assert wrong.returncode == 2
    assert "--compiled nowhere is not a folder: write it with " in wrong.stderr
    assert not (tmp_path / "output").exists()
