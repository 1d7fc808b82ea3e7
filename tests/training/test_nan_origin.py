"""Where a NaN/Inf began: the operation, its line, the parameter, and the examples."""

import dataclasses
import functools
import json
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx
from program import TINY_MLM, environment, two_processes, write_corpus

from jaxtrain import config
from jaxtrain.bench.measurement import synthetic_batch
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import RunAgain
from jaxtrain.ops import per_device
from jaxtrain.sharding import ShardingRule, batch_sharding, replicated
from jaxtrain.training import nan_origin, setup
from jaxtrain.training.nan_origin import FindNan
from jaxtrain.training.state import ModelDefinition, State
from jaxtrain.training.step import build_gradients

LAYERS, WIDTH, ROWS = 4, 8, 16
IDS = range(100, 100 + ROWS)


class Faulty(nnx.Module):
    """A linear model with a fault of some kind, in examples that the batch marks as bad."""

    def __init__(self, kind: str, rngs: nnx.Rngs) -> None:
        self.kind = kind
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers_LHH = nnx.Param(jnp.stack([jnp.eye(WIDTH)] * LAYERS))
        self.scale = nnx.Param(jnp.ones((1, WIDTH)))

    def loss(self, batch: dict[str, jax.Array], keys_B: jax.Array) -> Any:
        del keys_B
        x_BH, bad_B1 = self.first(batch["x"]), batch["bad"][:, None].astype(self.scale.dtype)
        x_BH = getattr(self, self.kind)(x_BH, bad_B1) * self.scale
        error_B = jnp.square(x_BH).mean(-1)
        return error_B.sum(), jnp.float32(ROWS), {}

    def fine(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        return x_BH

    def forward(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        return x_BH * ((1 - bad_B1) / (1 - bad_B1))  # in forward

    def within(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        @jax.checkpoint
        @jax.jit
        def inside(x_BH: jax.Array) -> jax.Array:
            return jnp.log(x_BH * 0 + 1 - 2 * bad_B1)  # in within

        return inside(x_BH)

    def backward(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        return x_BH + jnp.sqrt(x_BH * 0 + 1 - bad_B1)  # in backward

    def scanned(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        def layer(x_BH: jax.Array, of_layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            number, weight_HH = of_layer
            x_BH = x_BH @ weight_HH
            return x_BH / (1 - bad_B1 * (number == 2)), None  # in scanned

        return jax.lax.scan(layer, x_BH, (jnp.arange(LAYERS), self.layers_LHH[...]))[0]

    def looped(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        stopped_BH = jax.lax.stop_gradient(x_BH)
        return (
            x_BH
            + jax.lax.while_loop(
                lambda of: of[0] < 5,
                lambda of: (of[0] + 1, of[1] / (1 - bad_B1 * (of[0] == 3))),  # in looped
                (0, stopped_BH),
            )[1]
        )

    def branch(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        return jax.lax.cond(
            bad_B1.sum() > 0,
            lambda x_BH: x_BH / (1 - bad_B1),  # in branch
            lambda x_BH: x_BH,
            x_BH,
        )

    def overflow(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        x_BH = x_BH * jnp.exp(200 * bad_B1)  # in overflow
        return jax.nn.softmax(x_BH)  # Inf - Inf, where it becomes NaN

    def mask(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        hidden_H = jnp.arange(WIDTH)[None] > 5
        x_BH = jnp.where(hidden_H, -jnp.inf, x_BH) + jnp.log(1.0 - hidden_H)
        return jax.nn.softmax(x_BH / 1.5) / (1 - bad_B1)  # in mask

    def masked(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        hidden_BH = (jnp.arange(WIDTH)[None] > 5) | (bad_B1 > 0)
        x_BH = jnp.where(hidden_BH, -jnp.inf, x_BH)
        return jax.nn.softmax(x_BH)  # in masked

    def where(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        never_BH = jnp.log(jax.lax.stop_gradient(x_BH) * 0 - 1)  # NaN, but unused
        return jnp.where(bad_B1 > 5, never_BH, x_BH) / (1 - bad_B1)  # in where

    def on_each_device(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        mesh, over = per_device._devices.get().mesh, jax.sharding.PartitionSpec(("data", "fsdp"))

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(over, over), out_specs=over)
        def inside(x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
            never_BH = jnp.where(bad_B1 > 5, -jnp.inf, x_BH)
            x_BH = never_BH / jnp.exp(200 * bad_B1)
            x_BH = x_BH / (1 - bad_B1)  # in on_each_device
            return x_BH - jax.lax.psum(0 * x_BH.sum(), ("data", "fsdp"))

        return inside(x_BH, bad_B1)

    def large(self, x_BH: jax.Array, bad_B1: jax.Array) -> jax.Array:
        return jnp.square(x_BH) * 1e15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The model's config."""

    kind: str
    freeze: tuple[str, ...] = ()

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        return Faulty(self.kind, rngs)

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            "x": jax.ShapeDtypeStruct((batch_size, WIDTH), jnp.float32),
            "bad": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
        }


def _placed(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Puts an array on devices; device_put compares it between processes, and NaN is unequal."""
    values = np.asarray(array)
    return jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])


class Examined:
    """The second pass over a step of a faulty model, and what it prints."""

    def __init__(
        self,
        kind: str,
        *,
        data: int = 1,
        fsdp: int = 1,
        accumulate: int = 1,
        precision: Any = "float32",
        still_alive: Callable[[], None] = lambda: None,
        begun: Path = Path("/nowhere/.finding-nan"),
    ) -> None:
        self.said: list[str] = []
        self.stopping = False
        self.mesh = toy.mesh_of(data, fsdp)
        settings = config.Mesh(data=data, fsdp=fsdp, shard="params", min_shard_elements=1)
        self.rule = ShardingRule(self.mesh, settings)
        self.definition = ModelDefinition(Config(kind=kind).build)
        gradients = build_gradients(
            self.definition,
            self.rule,
            precision=precision,
            accumulate=accumulate,
            seed=1,
            receive=lambda batch: batch,
        )
        self.find = FindNan(
            gradients,
            accumulate,
            self.mesh,
            still_alive,
            lambda: self.stopping,
            self.said.append,
            begun,
        )

    def watch(self, bad: tuple[int, ...], step: int = 0, seen: int = 48, **changed: Any) -> None:
        """Passes a step with the examples ``bad``, and changed parameters or arrays."""
        params, extras = self.definition.init(jax.random.key(0))
        batch: dict[str, Any] = {
            "x": np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32),
            "bad": np.isin(np.arange(ROWS), bad).astype(np.float32),
        }
        for name, change in changed.items():
            arrays = batch if name in batch else params
            arrays[name.replace("__", ".")] = change(arrays[name.replace("__", ".")])
        whole = replicated(self.mesh)
        stored = self.definition.stored(self.rule)
        state = State(
            step=jnp.uint32(step),
            examples_seen=_placed(jnp.uint32(64), whole),
            params={name: _placed(params[name], stored[name]) for name in params},
            extras={name: _placed(array, whole) for name, array in extras.items()},
            opt=(),
            guard={},
        )
        of_batch = batch_sharding(self.mesh)
        self.find.watch(
            seen, state, {name: _placed(array, of_batch) for name, array in batch.items()}
        )

    def __call__(self, bad: tuple[int, ...] = (), **changed: Any) -> str:
        self.watch(bad, **changed)
        found = self.find(0, 48, IDS)
        assert found is not None, self.said
        assert not self.said
        return found


def line(kind: str) -> str:
    """Returns the place of a marked line of this file, as it is printed."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [at for at, text in enumerate(lines, 1) if text.endswith(f"# in {kind}")]
    return f"tests/training/{Path(__file__).name}:{number}"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("forward", "NaN begins in the forward pass at {} (div)"),
        ("within", "NaN begins in the forward pass at {} (log) after the parameter first.bias"),
        (
            "scanned",
            "Inf begins in the forward pass at {} (div, iteration 2) after the parameter "
            "layers_LHH",
        ),
        (
            "looped",
            "Inf begins in the forward pass at {} (div, iteration 3) after the parameter "
            "first.bias",
        ),
        ("branch", "Inf begins in the forward pass at {} (div) after the parameter first.bias"),
        ("overflow", "Inf begins in the forward pass at {} (exp)"),
        # Not the -inf of the masks, which are legal, nor the NaN that is not used.
        ("mask", "NaN begins in the forward pass at {} (div) after the parameter first.bias"),
        ("where", "Inf begins in the forward pass at {} (div) after the parameter first.bias"),
        # But a row in which everything is masked is not: Inf - Inf.
        ("masked", "NaN begins in the forward pass at {} (sub) after the parameter first.bias"),
    ],
)
def test_the_first_operation_is_named(kind: str, expected: str) -> None:
    found = Examined(kind)((3, 7))
    assert found == expected.format(line(kind)) + (
        ", in examples 103 (position 51), 107 (position 55)"
    )


@pytest.mark.parametrize(
    "how",
    [
        {"data": 2, "fsdp": 2},
        {"accumulate": 4},
        {"data": 1, "fsdp": 2, "accumulate": 2, "precision": "bfloat16"},
    ],
    ids=str,
)
def test_the_examples_are_named_on_any_mesh_with_any_accumulation(how: Any) -> None:
    found = Examined("overflow", **how)((6,))
    assert found.startswith(f"Inf begins in the forward pass at {line('overflow')} (exp")
    if "accumulate" in how:
        assert f"(exp, microbatch {6 % how['accumulate']})" in found
    assert found.endswith(", in example 106 (position 54)")


@pytest.mark.parametrize("how", [{}, {"data": 2, "fsdp": 2}], ids=str)
def test_the_operation_inside_a_shard_map_is_named(how: Any) -> None:
    found = Examined("on_each_device", **how)((3, 7))
    assert found.startswith(f"NaN begins in the forward pass at {line('on_each_device')} (div)")


def test_a_gradient_with_inf() -> None:
    """The derivative of sqrt is infinite at 0."""
    assert Examined("backward")((3,)) == (
        f"Inf begins in the backward pass at {line('backward')} (div) after the parameter "
        "first.bias, in example 103 (position 51); the loss is finite, and the gradient of "
        "first.bias, first.kernel is not"
    )


def test_a_norm_that_overflows() -> None:
    found = Examined("large")()
    assert found.startswith(
        "the gradients are finite, but their norm is not: the gradient of first."
    )


def test_a_parameter_with_nan() -> None:
    found = Examined("fine")(scale=lambda array: array.at[0, 2].set(jnp.nan))
    assert found.startswith("NaN in the parameter scale before the step: an earlier step computed")


def test_the_number_of_parameters_with_inf() -> None:
    def inf(array: jax.Array) -> jax.Array:
        return array / 0

    found = Examined("fine")(scale=inf, layers_LHH=inf, first__bias=inf, first__kernel=inf)
    assert "parameter first.bias, first.kernel, layers_LHH and 1 more before the step" in found


def test_an_example_with_nan() -> None:
    def planted(x_BH: np.ndarray) -> np.ndarray:
        return np.where(np.arange(ROWS)[:, None] == 5, np.nan, x_BH).astype(np.float32)

    assert Examined("fine")(x=planted) == (
        "NaN is in the batch's 'x', in example 105 (position 53)"
    )


def test_every_example_is_bad() -> None:
    assert Examined("forward")(tuple(range(ROWS))).endswith(", in all 16 examples of the batch")


def test_only_finite_values() -> None:
    assert Examined("fine")((3,)).startswith("not reproduced: a second computation of the step")


def test_the_step_after_it_was_good() -> None:
    """It is reported while the next step is computed, whose state replaces that before it."""
    examined = Examined("forward")
    examined.watch((3,))
    examined.watch((9,), step=1, seen=64)
    found = examined.find(0, 48, IDS)
    assert found is not None
    assert "in example 103 (position 51); computed with the parameters after the next" in found


def test_once_per_start() -> None:
    examined = Examined("fine")
    examined()
    examined.watch((3,))
    assert examined.find(0, 48, IDS) is None
    assert not examined.said


def test_a_failure_is_one_line() -> None:
    def broken() -> None:
        raise MemoryError("no memory\nis left")

    examined = Examined("forward", still_alive=broken)
    examined.watch((3,))
    assert examined.find(6, 48, IDS) is None
    assert examined.said == [
        "warning: loop.find_nan failed at step 7: MemoryError: no memory is left"
    ]


@pytest.mark.parametrize("other", ["the same", "a later operation", "no failure"])
def test_processes_fail_alike_at_the_same_operation(
    other: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = tmp_path / ".finding-nan"

    def broken() -> None:
        assert begun.read_text() == "7\n"
        raise MemoryError("no memory is left on device 0")

    def gather(what: str, text: str, timeout_s: float) -> list[str]:
        failure, operation, _, ids = json.loads(text)
        failure = "" if other == "no failure" else failure.replace("device 0", "device 8")
        operation += other == "a later operation"
        return [text, json.dumps([failure, operation, 8, ids])]

    monkeypatch.setattr(nan_origin.process_group, "gather", gather)
    examined = Examined("forward", still_alive=broken, begun=begun)
    examined.watch((3,))
    if other == "the same":
        assert examined.find(6, 48, IDS) is None
        assert not begun.exists()
        assert examined.said == [
            "warning: loop.find_nan failed at step 7: MemoryError: no memory is left on device 0"
        ]
        return
    with pytest.raises(RunAgain) as raised:
        examined.find(6, 48, IDS)
    first, second = (
        f"process {process}: MemoryError: no memory is left on device {8 * process} at operation "
        for process in range(2)
    )
    failures = f"{first}0, {second}1" if other == "a later operation" else f"{first}0"
    assert f"in all processes ({failures}), so they cannot continue" in str(raised.value)
    assert begun.read_text() == "7\n"  # the next start does not try again


def test_a_stop_ends_it() -> None:
    examined = Examined("forward")
    examined.stopping = True
    examined.watch((3,))
    assert examined.find(6, 48, IDS) is None
    assert examined.said == [
        "warning: loop.find_nan failed at step 7: RuntimeError: the run must stop"
    ]


def test_an_installed_model_is_not_part_of_a_library() -> None:
    standard = sysconfig.get_path("stdlib")
    assert nan_origin._never_a_model(f"{standard}/contextlib.py")
    assert nan_origin._never_a_model(jax.numpy.__file__)
    assert not nan_origin._never_a_model(f"{standard}/site-packages/mine/model.py")
    assert not nan_origin._never_a_model(__file__)


# Each process has four virtual devices and the ids of its own examples.
TWO = """
import json, os, sys
sys.path[:0] = sys.argv[1:3]
from jaxtrain.distributed import process_group
process_group.connect(os.environ, 4)
import jax, jax.numpy as jnp, numpy as np
from jaxtrain.errors import RunAgain
from jaxtrain.training import nan_origin
import test_nan_origin as test

index = jax.process_index()
nan_origin._ANSWER_S = 3.0

def find(kind, bad=(), how=None, **more):
    examined = test.Examined(kind, **(how or {"data": 2, "fsdp": 2}), **more.pop("more", {}))
    examined.stopping = more.pop("stopping", False)
    examined.watch(bad, **more)
    try:
        found = examined.find(0, 48, test.IDS[8 * index : 8 * index + 8])
    except RunAgain as error:
        found = f"RunAgain: {error}"
    print("found", json.dumps([found, examined.said]), flush=True)

def with_nan(x_BH):
    return np.where(np.arange(16)[:, None] == 13, np.nan, x_BH).astype(np.float32)

for kind in ("forward", "scanned", "looped", "branch", "mask", "backward"):
    find(kind, (3, 12))
find("overflow", (14,), {"data": 1, "fsdp": 4, "accumulate": 2, "precision": "bfloat16"})
find("fine", layers_LHH=lambda array: array.at[3, 2, 7].set(jnp.nan))
find("fine", x=with_nan)
find("fine", (3,))
nan_origin._on_cpu = lambda array: False
find("mask", (12,))
find("fine", stopping=index == 1)

calls = []
def broken():
    calls.append(0)
    if len(calls) == 20 and (index == 1 or all_break):
        raise MemoryError(f"no memory is left on device {4 * index}")

for all_break in (True, False):
    calls.clear()
    find("fine", more={"still_alive": broken})
os._exit(0)  # without waiting for the other process, which waits for this one
"""


@pytest.mark.slow
def test_two_processes_find_the_same(tmp_path: Path) -> None:
    here = Path(__file__).parent
    with two_processes(
        tmp_path,
        program=["-c", TWO, str(here), str(here.parent)],
        both={"XLA_FLAGS": "--xla_backend_optimization_level=0"},
    ) as started:
        second = started[1].communicate(timeout=300)[0]
        started[0].kill()
        assert started[0].stdout is not None
        first = started[0].stdout.read()
    outputs = [
        [json.loads(one[6:]) for one in text.splitlines() if one.startswith("found ")]
        for text in (first, second)
    ]
    of_first, of_second = outputs
    assert len(of_second) == 14, second
    *same, of_all_broken, alone = of_second
    assert of_first[:-1] == same, first
    examples = ", in examples 103 (position 51), 112 (position 60)"
    forward = "begins in the forward pass at"
    after = "after the parameter first.bias"
    expected = [
        f"NaN {forward} {line('forward')} (div){examples}",
        f"Inf {forward} {line('scanned')} (div, iteration 2) after the parameter layers_LHH"
        f"{examples}",
        f"Inf {forward} {line('looped')} (div, iteration 3) {after}{examples}",
        f"Inf {forward} {line('branch')} (div) {after}{examples}",
        f"NaN {forward} {line('mask')} (div) {after}{examples}",
        f"Inf begins in the backward pass at {line('backward')} (div) {after}{examples}; the loss "
        "is finite, and the gradient of first.bias, first.kernel is not",
        f"Inf {forward} {line('overflow')} (exp, microbatch 0), in example 114 (position 62)",
        "NaN in the parameter layers_LHH before the step: an earlier step computed it, or the "
        "weights that the run started from contain it",
        "NaN is in the batch's 'x', in example 113 (position 61)",
        "not reproduced: a second computation of the step, one operation at a time, has only "
        "finite values; if this happens again, check the devices with --loop.replay_every",
        f"NaN {forward} {line('mask')} (div) {after}, in example 112 (position 60)",
    ]
    assert same[:-1] == [[text, []] for text in expected]
    warning = "warning: loop.find_nan failed at step 1: "
    assert same[-1] == [None, [f"{warning}RuntimeError: the run must stop"]]
    broken = f"{warning}MemoryError: no memory is left on device "
    assert of_first[-1] == [None, [f"{broken}0"]]
    assert of_all_broken == [None, [f"{broken}4"]]
    assert alone[0].startswith(
        "RunAgain: loop.find_nan did not end the same way in all processes (process 1: "
        "MemoryError: no memory is left on device 4), so they cannot continue"
    )


@pytest.mark.slow
def test_a_run_of_two_processes_names_a_planted_example(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "corpus/text9.txt").write_text(" ".join(["z"] * 24) + ".")
    (tmp_path / "planted.py").write_text(PLANTED)
    flags = [
        *TINY_MLM,
        "--data.path",
        "corpus",
        "--loop.find_nan",
        "True",
        "--loop.steps",
        "4",
        "--seed",
        "54",
    ]
    flags += ["--simulate-devices", "4", "--mesh.fsdp", "4", "--output-dir", "out"]
    with two_processes(
        tmp_path,
        *flags,
        program=["planted.py"],
        both={"XLA_FLAGS": "--xla_backend_optimization_level=0"},
    ) as started:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    places = [tmp_path / "out" / name for name in ("bad_steps.jsonl", "bad_steps.1.jsonl")]
    (first,), (second,) = [map(json.loads, place.read_text().splitlines()) for place in places]
    assert first["origin"] == second["origin"]
    logs = [(tmp_path / "out" / name).read_text() for name in ("log.txt", "log.1.txt")]
    found = re.fullmatch(
        r"NaN begins in the forward pass at planted.py:12 \(div\), in example (\d+) "
        r"\(position (\d+)\)(; computed with the parameters after the next step)?",
        first["origin"],
    )
    assert found, first["origin"]
    example, position = int(found[1]), int(found[2])
    assert position == second["position"] + 4 + second["ids"].index(example)  # of process 1's rows
    for log in logs:
        assert f"); {first['origin']}: skipped; see bad_steps.jsonl" in log


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "overrides", "parameter", "expected"),
    [
        (
            "demo_gpt",
            (),
            "blocks.2.up",
            "Inf begins in the forward pass at jaxtrain/models/gpt.py:N (square) after the "
            "parameter blocks.2.up, in all 16 examples of the batch",
        ),
        (
            "demo_mlm",
            ("--mesh.fsdp", "2"),
            "layers.2.attention_norm.bias",
            "Inf begins in the backward pass at jaxtrain/models/mlm.py:N (mul in "
            "jaxtrain/ops/layers.py:N) after the parameter layers.2.ff_norm.scale, in all 32 "
            "examples of the batch; the loss is finite, and the gradient of embeddings.norm.bias, "
            "embeddings.norm.scale, embeddings.position and 35 more is not",
        ),
        (
            "demo",
            (),
            "decoder.head.bias",
            "Inf begins in the forward pass at jaxtrain/models/video_ae/autoencoder.py:N (square) "
            "after the parameter decoder.tail.bias, in all 4 examples of the batch",
        ),
        ("demo_gpt", (), "", "not reproduced: "),
    ],
)
def test_shipped_models(
    name: str,
    overrides: tuple[str, ...],
    parameter: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One large value is planted in a parameter; prints the time that it takes to find it."""
    run = config.load(name, overrides)
    mesh = toy.mesh_of(run.mesh.data, run.mesh.fsdp)
    parts = setup.build_without_data(run, mesh)
    state = parts.fresh_state()
    if parameter:
        array = np.array(state.params[parameter])
        array.flat[0] = 1e38
        planted = jax.device_put(array, state.params[parameter].sharding)
        state = dataclasses.replace(state, params={**state.params, parameter: planted})
    loud = dataclasses.replace(run, loop=dataclasses.replace(run.loop, find_nan=True))
    parts = dataclasses.replace(parts, run=loud)
    find = setup._find_nan(parts, tmp_path, StopSignals(), lambda: None, print)
    assert find is not None
    find.watch(0, state, synthetic_batch(parts))
    began, began_cpu = time.perf_counter(), time.process_time()
    found = find(0, 0, range(run.data.batch_size))
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    with capsys.disabled():
        print(f"\n{name} {parameter or '(nothing)'}: {wall_s:.1f} s, {cpu_s:.1f} CPU s")
    assert found is not None
    assert re.sub(r"py:\d+", "py:N", found).startswith(expected)


# An example with many equal tokens in a row makes the loss 0/0.
PLANTED = """
import jax.numpy as jnp
from jaxtrain import main
from jaxtrain.models import mlm

inherited = mlm.MaskedLanguageModel.logits_at

def logits_at(self, tokens_BS, *arguments):
    logits_BMV = inherited(self, tokens_BS, *arguments)
    equal_BS = (tokens_BS[:, 1:] == tokens_BS[:, :-1]) & (tokens_BS[:, 1:] != self.pad_id)
    fine_B11 = (equal_BS.sum(1) < 8).astype(logits_BMV.dtype)[:, None, None]
    return logits_BMV * (fine_B11 / fine_B11)

mlm.MaskedLanguageModel.logits_at = logits_at
main.console()
"""


@pytest.mark.slow
def test_a_run_names_a_planted_example(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    (tmp_path / "corpus/text9.txt").write_text(" ".join(["z"] * 24) + ".")
    (tmp_path / "planted.py").write_text(PLANTED)
    arguments = [*TINY_MLM, "--data.path", "corpus", "--loop.find_nan", "True"]
    arguments += ["--loop.steps", "None", "--loop.epochs", "2", "--checkpoint.every", "50"]

    def started(policy: str) -> subprocess.CompletedProcess[str]:
        each = ["--optim.bad_updates", policy, "--output-dir", policy]
        return subprocess.run(
            [sys.executable, "planted.py", *arguments, *each],
            cwd=tmp_path,
            env=environment(tmp_path, XLA_FLAGS="--xla_backend_optimization_level=0"),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    ended = started("skip")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    bad = [
        json.loads(text) for text in (tmp_path / "skip/bad_steps.jsonl").read_text().splitlines()
    ]
    assert len(bad) == 2  # once per epoch, and no second pass
    assert not (tmp_path / "skip/.finding-nan").exists()
    assert bad[1]["origin"] is None
    (example,) = set(bad[0]["ids"]) & set(bad[1]["ids"])
    position = bad[0]["position"] + bad[0]["ids"].index(example)
    origin = bad[0]["origin"]
    assert origin.startswith("NaN begins in the forward pass at planted.py:12 (div), in example")
    assert f"in example {example} (position {position})" in origin
    assert f"); {origin}: skipped; see bad_steps.jsonl" in ended.stdout
    # And in the error of a run that ends.
    ended = started("off")
    assert ended.returncode == 2
    (error,) = [text for text in ended.stderr.splitlines() if text.startswith("error: ")]
    assert f"NaN begins in the forward pass at planted.py:12 (div), in example {example}" in error
