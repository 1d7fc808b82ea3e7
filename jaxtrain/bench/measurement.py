"""What one process measures of a config: start, steps, pipeline, memory, saves, operations.

All rows are measured here, except those that say "counted": they come from the model's formula or
from the compiler.
"""

import collections
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import building, checkpoint, compiling, config, devices, processes, saving, throughput
from jaxtrain import mesh as meshes
from jaxtrain import state as states
from jaxtrain.bench import ceilings, timing, trace
from jaxtrain.building import Built
from jaxtrain.data import pipeline
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Sources
from jaxtrain.errors import InputError

PARTS = ("steps", "trace", "pipeline", "save", "ceilings")
TOP_OPERATIONS = 12
_TRACED_STEPS = 3
_LEAST_STEPS = 5
_FIRST_STEPS = 2  # a pipeline's first batches were loaded while nothing else ran

Rows = dict[str, Any]
Step = Callable[[states.State, Any], tuple[states.State, Any]]


def measure(request: dict[str, Any], rows: Rows) -> dict[str, Any]:
    """Measures what ``request["parts"]`` names; a start always.

    Args:
        request: made by :class:`jaxtrain.bench.request.Request`.
        rows: of the start so far, s.

    Returns:
        ``rows`` (name -> number or :meth:`timing.Times.summary`), ``device``, ``operations``,
        ``notes`` (part -> why it was left out).
    """
    clock = _Laps(rows)
    run = config.load(request["config"], request["overrides"])
    processes.connect({}, request["simulate_devices"])
    compiling.use_cache({}, Path(request["compiled"]))
    mesh = meshes.make(run.mesh)
    clock.lap("start/devices")
    # How many steps a run has changes nothing that is measured; counting them may take the data.
    built = building.build(_with_steps(run), mesh, 1, _silent)
    state = built.fresh_state()
    clock.lap("start/state")
    step = built.compile_step()
    clock.lap("start/compile")
    batch = synthetic_batch(built)
    clock.skip()
    state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    clock.lap("start/first_step")
    rows["start/total"] = sum(rows[name] for name in rows if name.startswith("start/"))

    found: dict[str, Any] = {"rows": rows, "notes": {}, "operations": [], "device": _device(mesh)}
    parts, seconds = request["parts"], request["seconds"]
    if "steps" in parts:
        state, times = _steps(step, state, iter(lambda: batch, None), seconds)
        rows |= _rates(built, times, "synthetic")
        rows |= _memory(step)
    if "trace" in parts:
        state, found["operations"] = _trace(step, state, batch, len(jax.local_devices()))
    if "pipeline" in parts:
        try:
            state, more = _pipeline(built, step, state, seconds)
            rows |= more
        except InputError as error:
            found["notes"]["pipeline"] = str(error)
    if "save" in parts:
        rows |= _save(run, state)
    if "ceilings" in parts:
        del state, batch
        rows |= _shares(rows, step, run.precision, mesh.size)
    return found


def synthetic_batch(built: Built) -> dict[str, jax.Array]:
    """A batch of the model's ``batch_spec`` on the devices: random whole numbers, ones otherwise.

    A model whose whole numbers are indices says how many there are (``Config.index_limits``).
    """
    rng = np.random.default_rng(0)
    limits: dict[str, int] = getattr(built.run.model, "index_limits", dict)()
    sharding = meshes.batch_sharding(built.rule.mesh)

    def array(name: str, part: jax.ShapeDtypeStruct) -> np.ndarray:
        if not jnp.issubdtype(part.dtype, jnp.integer):
            return np.ones(part.shape, part.dtype)
        return rng.integers(0, limits.get(name, 256), part.shape, part.dtype)

    return {name: jax.device_put(array(name, part), sharding) for name, part in built.spec.items()}


class _Laps:
    """Adds the time since the last lap to the rows, under a name."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.skip()

    def skip(self) -> None:
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        self._rows[name] = time.perf_counter() - self._last
        self.skip()


def _with_steps(run: config.Run) -> config.Run:
    steps = run.loop.steps or 10**6
    return dataclasses.replace(
        run, loop=dataclasses.replace(run.loop, steps=steps, epochs=None, tokens_per_param=None)
    )


def _silent(line: str) -> None:
    del line


def _steps(
    step: Step, state: states.State, batches: Iterator[Any], seconds: float
) -> tuple[states.State, timing.Times]:
    """Times steps as the loop runs them: it looks at a step's metrics when the next one is queued.

    So a time is that from the end of one step to the end of the next.
    """
    pending: collections.deque[Any] = collections.deque()
    ends: list[float] = []

    def finish() -> None:
        jax.block_until_ready(pending.popleft())
        ends.append(time.perf_counter())

    began = time.perf_counter()
    while len(ends) <= _FIRST_STEPS + _LEAST_STEPS or time.perf_counter() - began < seconds:
        state, metrics = step(state, next(batches))
        pending.append(metrics)
        if len(pending) > 1:
            finish()
    finish()
    return state, timing.Times(tuple(np.diff(ends[_FIRST_STEPS:])))


def _rates(built: Built, times: timing.Times, prefix: str) -> Rows:
    run = built.run
    rate = run.data.batch_size / times.median_s
    rows: Rows = {f"{prefix}/step": times.summary(), f"{prefix}/examples_per_second": rate}
    tokens = run.model.tokens_per_example()
    if tokens is not None:
        rows[f"{prefix}/tokens_per_second"] = rate * tokens
    flops = rate * run.model.flops_per_example() / built.rule.mesh.size
    rows[f"{prefix}/flops_per_second_per_device"] = flops
    peak = throughput.peak_bf16_flops(jax.devices()[0].device_kind)
    if peak is not None:
        rows[f"{prefix}/mfu"] = flops / peak
    return rows


def _memory(step: Any) -> Rows:
    """The allocator's peak where there is one, and what the compiler planned."""
    planned = step.memory_analysis()
    held = planned.argument_size_in_bytes + planned.output_size_in_bytes
    rows: Rows = {
        "memory/compiled_gib": (held - planned.alias_size_in_bytes + planned.temp_size_in_bytes)
        / devices.GIB,
        "memory/compiled_temporaries_gib": planned.temp_size_in_bytes / devices.GIB,
    }
    measured = devices.memory_gib()
    if measured is not None:
        rows["memory/device_peak_gib"] = measured
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        rows["memory/host_peak_gib"] = int(lines["VmHWM"].split()[0]) * 1024 / devices.GIB
    return rows


def _trace(
    step: Any, state: states.State, batch: Any, count: int
) -> tuple[states.State, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_TRACED_STEPS):
                state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
        operations = trace.top_operations(
            Path(folder), step.as_text(), steps=_TRACED_STEPS, devices=count, count=TOP_OPERATIONS
        )
    return state, [dataclasses.asdict(operation) for operation in operations]


def _pipeline(
    built: Built, step: Step, state: states.State, seconds: float
) -> tuple[states.State, Rows]:
    run = built.run
    began = time.perf_counter()
    sources: Sources = run.data.open(run.model, seed=run.seed, say=_silent)
    opened_s = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        batches = pipeline.TrainingBatches(
            sources.train,
            built.rule.mesh,
            built.spec,
            start=0,
            batches=10**6,
            seed=run.seed,
            workers=run.data.workers,
            prefetch=run.data.prefetch,
            quarantine=Quarantine.open(Path(folder), jax.process_index()),
        )
        try:
            began = time.perf_counter()
            first = next(batches)
            first_batch_s = time.perf_counter() - began
            state, metrics = step(state, first)
            jax.block_until_ready(metrics)
            waited, began = batches.wait_s, time.perf_counter()
            state, times = _steps(step, state, batches, seconds)
            share = (batches.wait_s - waited) / (time.perf_counter() - began)
        finally:
            batches.close()
    rows = {"pipeline/open": opened_s, "pipeline/first_batch": first_batch_s}
    return state, rows | _rates(built, times, "pipeline") | {"pipeline/data_wait_fraction": share}


def _save(run: config.Run, state: states.State) -> Rows:
    """Twice, of which the second counts: the first one also starts Orbax."""
    meta = saving.describe(run, "bench")
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = checkpoint.Checkpoints(Path(folder) / checkpoint.CHECKPOINTS, 1, _silent)
        for number in range(2):
            numbered = dataclasses.replace(state, step=state.step + number)
            began = time.perf_counter()
            checkpoints.save(numbered, meta | {"step": int(numbered.step)})
            blocked_s = time.perf_counter() - began
            checkpoints.wait()
            complete_s = time.perf_counter() - began
        checkpoints.close()
        written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {
        "save/blocks_loop": blocked_s,
        "save/complete": complete_s,
        "save/gib": written / devices.GIB,
    }


def _shares(rows: Rows, step: Any, precision: config.Precision, count: int) -> Rows:
    """The device's own ceilings, and how close the synthetic step comes to them."""
    found = ceilings.measure()
    peak = found.bf16_flops if precision == "bfloat16" else found.float32_flops
    shares: Rows = {
        f"ceilings/{field.name}": getattr(found, field.name) for field in dataclasses.fields(found)
    }
    if "synthetic/step" not in rows:
        return shares
    median_s = rows["synthetic/step"]["median_s"]
    shares["synthetic/share_of_measured_flops"] = (
        rows["synthetic/flops_per_second_per_device"] / peak
    )
    counted = (step.cost_analysis() or {}).get("bytes accessed")
    if counted:
        rate = counted / median_s
        shares["synthetic/bytes_per_second"] = rate
        shares["synthetic/share_of_measured_copy"] = rate / found.copy_bytes
        datasheet = throughput.memory_bytes_per_second(jax.devices()[0].device_kind)
        if datasheet is not None:
            shares["synthetic/share_of_datasheet_bandwidth"] = rate / datasheet
    return shares


def _device(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    device = mesh.devices.flat[0]
    return {
        "kind": device.device_kind,
        "count": mesh.size,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "driver": devices.driver_version(),
        "cpus": os.cpu_count(),
    }
