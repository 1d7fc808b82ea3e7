"""The trace of a compiled step: what took the time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.training import traces

PROGRAM = """\
HloModule jit_f

%body (p: f32[4]) -> f32[4] {
  ROOT %dot.3 = f32[4]{0} dot(%a, %b), metadata={op_name="jit(f)/while/body/dot_general"}
}

ENTRY %main {
  %fusion.1 = (f32[4]{0}, f32[4]{0}) fusion(%p), kind=kLoop, metadata={op_name="jit(f)/add"}
  while.2 = f32[4]{0} while(%x), condition=%c, body=%body
}
"""


def test_instructions_are_read_from_the_program() -> None:
    found = traces._described(PROGRAM)
    assert found["dot.3"] == ("dot", "jit(f)/while/body/dot_general", "dot_general")
    assert found["fusion.1"] == ("fusion", "jit(f)/add", "add")
    assert found["while.2"] == ("while", "", "the compiler's own")


def test_a_name_is_the_model_s_own_words() -> None:
    made_by = (
        "jit(train_step)/transpose(jvp(transpose(transpose(jvp(bsnk,btnk->bnst)))))/dot_general"
    )
    line = "models/mlm.py:9 (backward)"
    assert traces._name(made_by, line) == f"{line} bsnk,btnk->bnst/dot_general"
    assert traces._name("jit(f)/jvp(block)/while/body/jit(_where)/mul", None) == "block/_where/mul"


def test_on_a_gpu_only_its_streams_count() -> None:
    """Not the sums over them that are made for the viewer, nor what the host says."""

    def line(name: str, *events: tuple[str, float]) -> Any:
        made = [SimpleNamespace(stats=[("hlo_op", op)], duration_ns=time) for op, time in events]
        return SimpleNamespace(name=name, events=made)

    planes = [
        SimpleNamespace(name="/host:CPU", lines=[line("python", ("dot.3", 1000))]),
        SimpleNamespace(
            name="/device:GPU:0",
            lines=[
                line("Stream #7(Compute)", ("dot.3", 5), ("fusion.1", 2), ("dot.3", 5)),
                line("Stream #9(Memcpy)", ("while.2", 100)),  # a container: its body counts
                line("XLA Ops", ("dot.3", 10)),
            ],
        ),
    ]
    profile: Any = SimpleNamespace(planes=planes)
    found = traces._nanoseconds(profile, traces._described(PROGRAM))
    assert found == {"dot.3": 10, "fusion.1": 2}


def test_a_large_product_takes_longer_than_a_small_one(tmp_path: Path) -> None:
    def f(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("large"):
            x = x @ x
        with jax.named_scope("small"):
            y = y @ y
        return x, y

    x, y = jnp.ones((700, 700)), jnp.ones((40, 40))
    compiled = jax.jit(f).lower(x, y).compile()
    jax.block_until_ready(compiled(x, y))
    with jax.profiler.trace(tmp_path):
        for _ in range(3):
            jax.block_until_ready(compiled(x, y))
    files = list(tmp_path.rglob("*.xplane.pb"))
    found = traces.top_operations(files, compiled.as_text(), steps=3, devices=1, count=50)
    assert "large" in found[0].made_by
    assert found[0].name.startswith("large/")
    assert found[0].share > 0.5
    assert sum(one.share for one in found) <= 1.0001
    assert (
        traces.top_operations(files, compiled.as_text(), steps=6, devices=1, count=1)[0].ms_per_step
        * 2
        == found[0].ms_per_step
    )
