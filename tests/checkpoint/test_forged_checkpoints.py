"""Tests untrusted checkpoints: a valid manifest, and arbitrary content in the listed files."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small_state import State

from jaxtrain import config, main
from jaxtrain.checkpoint import layout, manifest
from jaxtrain.checkpoint.saver import Checkpoints
from jaxtrain.errors import InputError
from jaxtrain.interop import weights
from jaxtrain.models import gpt
from jaxtrain.training.state import ModelDefinition

MODEL = gpt.Config.tiny()
ODD: tuple[Any, ...] = (None, "abc", [[1]], {"a": 1}, -1, 10**15, 10**30, 1e300, True)
META = {
    "step": 8,
    "examples_seen": 80,
    "examples_left_out": 0,
    "best": {"step": 8, "metric": "val/loss", "mode": "min", "validations_since": 0},
    "constants": {},
    "evaluation_due": False,
    "fingerprint": "0123456789",
    "versions": {"jax": "0"},
    "config": {
        "name": "tiny",
        "seed": 1,
        "model": config.to_dict(MODEL),
        "data": {"path": None, "batch_size": 10, "clips_per_video": 1},
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    params = {
        name: jax.numpy.asarray(rng.normal(size=leaf.shape).astype(np.float32))
        for name, leaf in ModelDefinition(MODEL.build).params.items()
    }
    step = jax.numpy.asarray(np.uint32(8))
    state = State(step=step, examples_seen=step, params=params, extras={}, opt={})
    run = tmp_path_factory.mktemp("saved") / "run"
    saver = Checkpoints(run / "checkpoints", 2)
    saver.save(state, META)
    saver.close()
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.fixture
def one(run: Path) -> Path:
    return run / "checkpoints" / "8"


def resign(one: Path) -> None:
    manifest.write(one, 8)


def attempt(one: Path) -> dict[str, str]:
    """Calls everything that reads a checkpoint; returns each error, "" if there is none."""
    resign(one)
    said = {}
    reads: dict[str, Callable[[], object]] = {
        "load": lambda: weights.load(one),
        "model_at": lambda: weights.model_at(one),
        "meta": lambda: layout.read_run_meta(one),
        "shapes": lambda: layout.read_shapes(one),
    }
    for name, read in reads.items():
        said[name] = ""
        try:
            read()
        except InputError as error:
            said[name] = str(error)
    for line in said.values():
        assert "\n" not in line
        assert len(line) < 1500
    return said


def changed(value: Any, deep: int = 4) -> Iterator[tuple[str, Any]]:
    """Returns JSON with one value replaced or removed."""
    if isinstance(value, dict | list) and deep:
        for key in value if isinstance(value, dict) else range(len(value)):
            for where, other in changed(value[key], deep - 1):
                copy = dict(value) if isinstance(value, dict) else list(value)
                copy[key] = other
                yield f"{key}.{where}", copy
            copy = dict(value) if isinstance(value, dict) else list(value)
            del copy[key]
            yield f"{key} gone", copy
    for odd in ODD:
        yield ascii(odd), odd


def described(one: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((one / "meta" / "metadata").read_text())
    return content


def test_a_saved_checkpoint_is_read(one: Path) -> None:
    assert attempt(one) == dict.fromkeys(("load", "model_at", "meta", "shapes"), "")


def test_invalid_metadata_causes_errors_of_one_line(one: Path) -> None:
    every = list(changed(described(one)))
    assert len(every) > 500
    for _, content in random.Random(0).sample(every, 60):
        (one / "meta" / "metadata").write_text(json.dumps(content))
        attempt(one)


WRONG: dict[str, tuple[Any, ...]] = {
    "step": (None, "8", -1, 8.0, True, 10**30, [8]),
    "examples_seen": (None, "abc", {}),
    "best": (7, [], {}, {"step": "x"}, {"step": 8, "metric": 1}),
    "fingerprint": (None, 7, []),
    "config": (None, [], {}, {"seed": 1}, {"seed": "1", "name": "a"}),
    "versions": (None, []),
    "constants": (None, [], {"lpips": 7}),
    "evaluation_due": (None, 1, "no"),
}


@pytest.mark.parametrize(
    ("part", "value"), [(part, value) for part, values in WRONG.items() for value in values]
)
def test_a_run_resumes_only_from_valid_run_metadata(one: Path, part: str, value: Any) -> None:
    content = described(one)
    content["meta"][part] = value
    (one / "meta" / "metadata").write_text(json.dumps(content))
    assert f"checkpoint {one} was not written by jaxtrain: meta." in attempt(one)["meta"]


SHAPES: tuple[Any, ...] = ([-1], [1.0], ["2"], [2**63], [True], [2**40, 2**40], 2, None, {})
DTYPES: tuple[Any, ...] = ("O", "U9", "float31", "V8", "f4,f4", "S9", "", 7, None, [])
ARRAYS: list[Any] = [
    *(None, [], {}, {"shape": [2]}, {"dtype": "int8"}),
    *({"shape": [2], "dtype": dtype} for dtype in DTYPES),
    *({"shape": shape, "dtype": "float32"} for shape in SHAPES),
]


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_invalid_array_descriptions_are_rejected(one: Path, array: Any) -> None:
    content = described(one)
    content["arrays"]["params.wte.table"] = array
    (one / "meta" / "metadata").write_text(json.dumps(content))
    words = "the shape or dtype of 'params.wte.table' in meta/metadata is not that of an array"
    assert words in attempt(one)["shapes"]


def test_huge_shapes_are_rejected_before_memory_is_allocated(one: Path) -> None:
    content = described(one)
    content["arrays"]["params.wte.table"]["shape"] = [10**6, 10**6]
    (one / "meta" / "metadata").write_text(json.dumps(content))
    said = attempt(one)
    assert said["shapes"] == ""
    assert "its arrays would take 4,000,000,0" in said["load"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": [10**6, 10**6]}, "is not compatible with the stored shape"),
        ({"chunks": [10**6, 10**6]}, "Requested more bytes than we reserved space for"),
        ({"chunks": [1, 1]}, "cannot be read"),
        ({"dtype": "<f8"}, "cannot be read"),
        ({"dtype": "|S1000000000"}, "cannot be read"),
        ({"shape": [-1, 16]}, "cannot be read"),
        ({"compressor": {"id": "gzip", "level": 1}}, "cannot be read"),
    ],
    ids=str,
)
def test_arrays_with_contradicting_metadata_are_rejected(
    one: Path, changes: dict[str, Any], words: str
) -> None:
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{one}/state/"}).result()
    key = "params.wte.table/.zarray"
    content = json.loads(store.read(key).result().value) | changes
    store.write(key, json.dumps(content).encode()).result()
    assert words in attempt(one)["load"]


@pytest.mark.parametrize("kind", ["None", "scalar", "string", "np.ndarray", "Dict", "x", 7, None])
def test_a_value_that_orbax_restores_as_another_type_is_rejected(one: Path, kind: object) -> None:
    path = one / "state" / "_METADATA"
    content = json.loads(path.read_text())
    entry = content["tree_metadata"]["('params.wte.table',)"]
    entry["value_metadata"]["value_type"] = kind
    path.write_text(json.dumps(content))
    if not attempt(one)["load"]:
        params = weights.load(one).params
        assert params["wte.table"].dtype == np.float32


@pytest.mark.parametrize("seed", range(25))
def test_files_with_changed_bytes_are_read_or_rejected(one: Path, seed: int) -> None:
    rng = random.Random(seed)
    paths = sorted(path for path in one.rglob("*") if path.is_file())
    path = rng.choice([path for path in paths if path.name != manifest.NAME])
    content = bytearray(path.read_bytes())
    kind = rng.randrange(4)
    if kind == 0:
        content = content[: rng.randrange(len(content))]
    elif kind == 1:
        content = bytearray(b"[" * 10**6)
    else:
        for _ in range(rng.choice((1, 3, 30))):
            content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content)
    attempt(one)


def test_commands_print_only_one_line(one: Path, tmp_path: Path) -> None:
    """Not even warnings that Python prints when it frees Orbax's coroutines."""
    content = described(one)
    content["arrays"]["params.blocks.0.q"]["shape"] = [4, 4]
    (one / "meta" / "metadata").write_text(json.dumps(content))
    resign(one)
    to = str(tmp_path / "x.safetensors")
    command = [sys.executable, "-m", "jaxtrain.main", "export", str(one), to]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"error: {one} cannot be read")


def test_listing_checkpoints_tolerates_any_content(
    run: Path, one: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints"
    for name in ("007", "12.2", "7.replaced", "007.replaced", "\u0661\u0662", "\u00b2"):
        (folder / name).mkdir()
    os.mkfifo(one / "meta" / "pipe")
    aside = run / "damaged" / "checkpoints" / "3"
    aside.mkdir(parents=True)
    os.mkfifo(aside / "reason.txt")
    (one / "_CHECKPOINT_METADATA").write_text("[]")
    (run / "config.json").write_text('{"checkpoint": {"every": "x"}}')
    assert main.main(["checkpoints", str(run)]) == 1
    said = capsys.readouterr()
    assert "meta/pipe is a pipe or a device" in said.out or "DAMAGED" in said.out
    assert said.err == ""
    for content in (b"[]", b"[" * 10**6, b"{}", b"\xff", b'{"meta": []}', b'{"meta": {}}'):
        (one / "meta" / "pipe").unlink(missing_ok=True)
        (one / "meta" / "metadata").write_bytes(content)
        resign(one)
        assert main.main(["checkpoints", str(run)]) == 1
        assert re.search(r"^checkpoints/8 .* \? .*verified$", capsys.readouterr().out, re.MULTILINE)


def test_a_pipe_is_not_read_as_the_certified_step(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "certified.txt")
    pipe = os.open(tmp_path / "certified.txt", os.O_RDWR)  # otherwise a reader would wait forever
    os.write(pipe, b"7" * 20)
    with pytest.raises(OSError, match="not a regular file"):
        layout.certified_step(tmp_path)
    os.close(pipe)
