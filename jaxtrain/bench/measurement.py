"""Measures one config in this process: startup, steps, pipeline, memory, saves, operations.

Times and peaks are measured. FLOPs come from the program of the loss, bytes moved from the compiled
program, and planned memory from the compiler.
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

from jaxtrain import config
from jaxtrain.bench import ceilings, timing
from jaxtrain.checkpoint import saver
from jaxtrain.config.mesh_fit import fit_to_present_devices
from jaxtrain.cost import cards, step_time
from jaxtrain.cost.step_cost import StepCost
from jaxtrain.data import pipeline
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Sources
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError
from jaxtrain.formats import GIB
from jaxtrain.interop import hub
from jaxtrain.jobs.subprocess_worker import Send
from jaxtrain.ops import cpu
from jaxtrain.sharding import batch_sharding, make_mesh
from jaxtrain.telemetry import hardware
from jaxtrain.training import save_policy, setup, step_setup
from jaxtrain.training.diagnosis import profiler
from jaxtrain.training.model_flops import model_flops
from jaxtrain.training.state import State, saved_part
from jaxtrain.training.step_setup import StepSetup
from jaxtrain.xla import gpu_memory, options

TOP_OPERATIONS = 12
_TRACED_STEPS = 3
_LEAST_STEPS = 5
_FIRST_STEPS = 2

Rows = dict[str, Any]


def measure(request: dict[str, Any], send: Send) -> None:
    """Measures startup, then each of ``request["parts"]``; a part that fails gets a note.

    Args:
        send: receives all findings after each part: ``rows`` (name -> number or
            :meth:`timing.Times.summary`), ``device``, ``operations``, ``notes`` (part ->
            why it was skipped or failed), ``failed`` (the parts that failed; the others were
            skipped, because of the config or the data).
    """
    rows: Rows = {f"start/{name}": seconds for name, seconds in request["start"].items()}
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        rows[name], began = time.perf_counter() - began, time.perf_counter()

    run = config.load(request["config"], request["overrides"])
    gpu_memory.reserve_memory(os.environ)
    if process_group.will_use_cpu(os.environ):
        cpu.keep_freed()
    process_group.connect({}, request["simulate_devices"])
    process_group.check_accelerator(os.environ)
    options.use_cache({}, Path(request["compiled"]))
    run, _ = fit_to_present_devices(run)
    mesh = make_mesh(run.mesh)
    lap("start/config_and_devices")
    built = step_setup.build_without_data(run, mesh)
    state = built.fresh_state()
    lap("start/state")
    traced = built.trace_step()
    with built.lowering():
        step = traced.lower().compile()
    lap("start/compile")
    batch, scalars = synthetic_batch(built), built.schedule.scalars(0)
    began = time.perf_counter()
    state, metrics = step(state, batch, scalars)
    jax.block_until_ready(metrics)
    lap("start/first_step")
    rows["start/total"] = sum(rows[name] for name in rows if name.startswith("start/"))

    findings: dict[str, Any] = {
        "rows": rows,
        "notes": {},
        "failed": [],
        "operations": [],
        "device": _device(mesh),
    }
    send(findings)
    cost = built.cost(traced, step)
    session = _Session(built, step, cost, state, batch, request["seconds"])
    measured: dict[str, Callable[[], Rows]] = {
        "steps": lambda: _steps(session),
        "trace": lambda: findings.update(operations=_operations(session)) or {},
        "pipeline": lambda: _pipeline(session),
        "save": lambda: _save(session),
        "ceilings": lambda: _shares(session, rows),
    }
    for part in request["parts"]:
        try:
            rows |= measured[part]()
        except Exception as error:
            # The findings so far must not be lost.
            findings["notes"][part] = f"{type(error).__name__}: {error}".splitlines()[0]
            if not isinstance(error, InputError):
                findings["failed"].append(part)
        send(findings)


def synthetic_batch(built: StepSetup) -> dict[str, jax.Array]:
    """Creates a batch of ``batch_spec`` on the devices: random integers, ones for other dtypes.

    Integers that are indices stay below their limits (``Config.index_limits``).
    """
    rng = np.random.default_rng(0)
    limits: dict[str, int] = built.run.model.index_limits()
    sharding = batch_sharding(built.rule.mesh)

    def array(name: str, part: jax.ShapeDtypeStruct) -> np.ndarray:
        if not jnp.issubdtype(part.dtype, jnp.integer):
            return np.ones(part.shape, part.dtype)
        return rng.integers(0, limits.get(name, 256), part.shape, part.dtype)

    return {name: jax.device_put(array(name, part), sharding) for name, part in built.spec.items()}


class _Session:
    """Holds the compiled step and the newest state."""

    def __init__(
        self, built: StepSetup, step: Any, cost: StepCost, state: State, batch: Any, seconds: float
    ) -> None:
        self.built, self.step, self.cost, self.batch = built, step, cost, batch
        self._state, self._seconds = state, seconds
        self._scalars = built.schedule.scalars(0)  # the values do not change the time

    @property
    def state(self) -> State:
        """The newest state; a fresh one if a failed step has consumed it."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._state)):
            self._state = self.built.fresh_state()
        return self._state

    def once(self, batch: Any, step: Any = None) -> Any:
        """Runs one step; returns its metrics, perhaps before they are computed.

        Args:
            step: the program; None is :attr:`step`.
        """
        self._state, metrics = (step or self.step)(self.state, batch, self._scalars)
        return metrics

    def times(
        self,
        batches: Iterator[Any],
        first: int = _FIRST_STEPS,
        queued: Callable[[Any], None] = lambda metrics: None,
    ) -> timing.Times:
        """Times steps as the loop runs them: a step's metrics are read once the next is queued.

        Each time is that from the end of one step to the end of the next.

        Args:
            batches: one per step.
            first: number of warm-up steps, not timed.
            queued: called with the metrics of each step once it is queued.
        """
        pending: collections.deque[Any] = collections.deque()
        ends: list[float] = []

        def finish() -> None:
            jax.block_until_ready(pending.popleft())
            ends.append(time.perf_counter())

        while len(ends) <= first + _LEAST_STEPS or ends[-1] - ends[first] < self._seconds:
            pending.append(self.once(next(batches)))
            queued(pending[-1])
            if len(pending) > 1:
                finish()
        finish()
        return timing.Times(tuple(np.diff(ends[first:])))


def _steps(session: _Session) -> Rows:
    times = session.times(iter(lambda: session.batch, None))
    rates = _rates(session.built, times, times.median_s, "synthetic")
    return rates | _of_plan(session, times.median_s) | _memory(session.cost)


def _rates(built: StepSetup, times: timing.Times, step_s: float, prefix: str) -> Rows:
    run = built.run
    rate = run.data.batch_size / step_s
    rows: Rows = {f"{prefix}/step": times.summary(), f"{prefix}/examples_per_second": rate}
    tokens = run.model.tokens_per_example()
    if tokens is not None:
        rows[f"{prefix}/tokens_per_second"] = rate * tokens
    flops = rate * model_flops(run.training_model) / built.rule.mesh.size
    rows[f"{prefix}/flops_per_second_per_device"] = flops
    peak, _ = cards.rates(jax.devices()[0].device_kind)
    if peak is not None:
        rows[f"{prefix}/mfu"] = flops / peak
    return rows


def _memory(cost: StepCost) -> Rows:
    rows: Rows = {
        "memory/compiled_gib": cost.planned_bytes / GIB,
        "memory/compiled_temporaries_gib": cost.temporaries / GIB,
    }
    measured = hardware.memory_gib()
    if measured is not None:
        rows["memory/device_peak_gib"] = measured
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "VmHWM" in lines:  # some sandboxes omit it
            rows["memory/host_peak_gib"] = int(lines["VmHWM"].split()[0]) * 1024 / GIB
    return rows


def _operations(session: _Session) -> list[dict[str, Any]]:
    step = session.built.compile_step(profiled=True)  # on CPUs the same program, from the cache
    program = step.as_text() or ""
    devices = len(jax.local_devices())
    with tempfile.TemporaryDirectory() as folder:
        # The first call of a program also loads its kernels.
        jax.block_until_ready(session.once(session.batch, step))
        with jax.profiler.trace(folder):
            for _ in range(_TRACED_STEPS):
                metrics = session.once(session.batch, step)
            jax.block_until_ready(metrics)
        times = profiler.instruction_times(Path(folder).rglob("*.xplane.pb"), program)
    if not times:
        raise InputError("the profiler recorded no operation of the step")
    runs = _TRACED_STEPS * devices
    top = profiler.top_operations(times, program, runs=runs, count=TOP_OPERATIONS)
    return [dataclasses.asdict(operation) for operation in top]


def _pipeline(session: _Session) -> Rows:
    """Measures steps on real batches.

    Workers that start together finish together: batches arrive in bursts, and a slow pipeline makes
    steps wait between them. So rates use the mean time, and prefetched batches do not count.
    """
    built, run = session.built, session.built.run
    began = time.perf_counter()
    sources: Sources = run.data.open(
        hub.with_local_tokenizer(run.model, _silent), seed=run.seed, say=_silent
    )
    opened_s = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        batches = pipeline.TrainingBatches(
            sources.train,
            built.rule.mesh,
            built.spec,
            start=0,
            seed=run.seed,
            workers=setup.workers_here(run, built.rule.mesh).number,
            prefetch=run.data.prefetch,
            quarantine=Quarantine.open(Path(folder), jax.process_index()),
        )
        try:
            began = time.perf_counter()
            first = next(batches)
            first_batch_s = time.perf_counter() - began
            jax.block_until_ready(session.once(first))
            waits: list[float] = []
            times = session.times(_watched(batches, waits), batches.ahead, batches.note_pending)
        finally:
            batches.close()
    rows = {"pipeline/open": opened_s, "pipeline/first_batch": first_batch_s}
    share = {"pipeline/data_wait_fraction": _waited_share(waits, times)}
    return rows | _rates(built, times, times.mean_s, "pipeline") | share


def _watched(batches: pipeline.TrainingBatches, waits: list[float]) -> Iterator[Any]:
    """Yields the batches; appends to ``waits`` the total time waited when each of them arrived."""
    for batch in batches:
        waits.append(batches.wait_s)
        yield batch


def _waited_share(waits: list[float], times: timing.Times) -> float:
    """Returns the fraction of the timed steps' time in which the devices waited for batches."""
    return (waits[-1] - waits[-1 - len(times.seconds)]) / sum(times.seconds)


def _save(session: _Session) -> Rows:
    """Measures the second of two saves: the first also starts Orbax."""
    state = saved_part(session.state, session.built.definition.file_weights)
    meta = save_policy.describe(session.built.run, "bench").to_dict()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = saver.CheckpointSaver(Path(folder), 1, _silent)
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
        "save/gib": written / GIB,
    }


def _shares(session: _Session, rows: Rows) -> Rows:
    peaks = ceilings.measure()
    shares: Rows = {
        f"ceilings/{field.name}": getattr(peaks, field.name) for field in dataclasses.fields(peaks)
    }
    if "synthetic/step" not in rows:
        return shares
    matmuls = peaks.bf16_flops if session.built.run.precision == "bfloat16" else peaks.float32_flops
    of_model = rows["synthetic/flops_per_second_per_device"]
    shares["synthetic/share_of_measured_flops"] = of_model / matmuls
    rate = session.cost.moved_bytes / rows["synthetic/step"]["median_s"]
    shares["synthetic/share_of_measured_copy"] = rate / peaks.copy_bytes
    return shares


def _of_plan(session: _Session, step_s: float) -> Rows:
    """Compares a step with the datasheet's peaks and with its serial bound, as ``plan`` does."""
    rate = session.cost.moved_bytes / step_s
    rows: Rows = {"synthetic/bytes_per_second": rate}
    kind = jax.devices()[0].device_kind
    _, datasheet = cards.rates(kind)
    if datasheet is not None:
        rows["synthetic/share_of_datasheet_bandwidth"] = rate / datasheet
    card = cards.of_device(kind)
    if card is not None:
        time = step_time.step_time(session.cost, card, session.built.run.precision)
        rows["synthetic/step_at_peaks"] = max(time.arithmetic, time.memory)
        rows["synthetic/serial_bound"] = time.serial
        rows["synthetic/of_serial_bound"] = time.serial / step_s
    return rows


def _device(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    device = mesh.devices.flat[0]
    return {
        "kind": device.device_kind,
        "count": mesh.size,
        "platform": device.platform,
        "platform_version": " ".join(device.client.platform_version.split()),
        "driver": hardware.driver().version,
        "cpus": os.cpu_count(),
    }


def _silent(line: str) -> None:
    del line
