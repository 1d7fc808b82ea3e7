"""Compiles the real training step for GPUs that are described but not present."""

import dataclasses
import math
import re
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import topologies

from jaxtrain import config
from jaxtrain.cost import cards, operations
from jaxtrain.cost.hlo import Stacks
from jaxtrain.cost.step_cost import StepCost, Traffic
from jaxtrain.jobs.subprocess_worker import Send
from jaxtrain.ops import per_device
from jaxtrain.sharding import make_mesh
from jaxtrain.training import step_setup
from jaxtrain.training.model_flops import model_flops
from jaxtrain.training.state_size import bytes_per_device, parameter_count, total_bytes
from jaxtrain.training.step import build_eval_step

_LARGEST = 5

_TEMPORARIES = re.compile(r"^allocation \d+: .*\bpreallocated-temp", re.MULTILINE)
_VALUE = re.compile(
    r"^ value: <\d+ (\S+?)(?:\{\S*\})? @\S+> \(size=(\d+),offset=(\d+)\): (\S+)", re.MULTILINE
)
_INSTRUCTION = re.compile(
    r'^\s+(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)".*?stack_frame_id=(\d+)', re.MULTILINE
)


@dataclasses.dataclass(frozen=True)
class Temporary:
    """A slot in the memory for temporaries.

    Attributes:
        shape: element type and shape of the first value in it, such as "bf16[96,480,720,64]".
        made_by: source lines that create its values, in order, with the pass; a line of the model
            where one is known.
    """

    size: int
    shape: str
    made_by: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A config's step, compiled for GPUs.

    Attributes:
        parameters: bytes of a device's parameters and model state.
        optimizer: bytes of a device's optimizer state.
        gradients: bytes of a device's gradients, among the temporaries.
        second_state: bytes of a device's second state, which a step that is computed twice needs
            (``loop.replay_every``); 0 without one.
        file_weights: number of weights that are read from files and not trained.
        checkpoint: bytes of the state that a checkpoint stores.
        samples: "image" and "clip" -> pixels per validation.
        unsharded: name -> shape of the parameters that ``mesh.fsdp`` does not divide.
        total: steps of the run; None if that depends on the data.
    """

    cost: StepCost
    parameters: int
    optimizer: int
    gradients: int
    second_state: int
    largest: tuple[Temporary, ...]
    elements: int
    file_weights: int
    frozen: int
    checkpoint: int
    samples: Mapping[str, int]
    unsharded: Mapping[str, tuple[int, ...]]
    batch_of: str
    total: int | None
    compile_s: float
    jax: str

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Returns what ``dataclasses.asdict`` turned into JSON."""
        cost, largest = values["cost"], values["largest"]
        rows = None if cost["traffic"] is None else tuple(Traffic(**row) for row in cost["traffic"])
        largest = tuple(Temporary(**slot | {"made_by": tuple(slot["made_by"])}) for slot in largest)
        work = tuple(operations.Work(**row) for row in cost["work"])
        read = StepCost(**cost | {"traffic": rows, "work": work})
        return cls(**{**values, "cost": read, "largest": largest})


def run(request: dict[str, Any], send: Send) -> None:
    """Sends the result of :func:`compile_step` as JSON; runs in the compiling process."""
    del request["start"]
    send(dataclasses.asdict(compile_step(**request)))


def compile_step(
    config_name: str, overrides: list[str], gpu: str, gpus_per_node: int, dump: str
) -> CompiledStep:
    """Compiles the step of a config."""
    began = time.perf_counter()
    run = config.load(config_name, overrides)
    built = step_setup.build_without_data(
        run, make_mesh(run.mesh, _devices(gpu, gpus_per_node, run.mesh.devices))
    )
    with per_device.tracing(platform="cuda"):
        traced = built.trace_step()
    # XLA compiles without Python's lock.
    with built.lowering(), ThreadPoolExecutor(1) as pool:
        lowered = traced.lower(lowering_platforms=("cuda",))
        compiling = pool.submit(lowered.compile)
        samples = _sample_pixels(built)
        # Traces another program, meanwhile; built.cost() finds the result in the cache.
        model_flops(run.training_model)
        compiled = compiling.result()
    definition, target = built.definition, built.target
    trained = definition.trained(target.params)
    replays = run.loop.replay_every is not None  # from a copy of the state
    return CompiledStep(
        cost=built.cost(traced, compiled, gpus_per_node),
        parameters=bytes_per_device((target.params, target.extras)),
        optimizer=bytes_per_device(target.opt),
        gradients=bytes_per_device(trained) * (1 if run.optim.accumulate == 1 else 2),
        second_state=bytes_per_device(target) if replays else 0,
        largest=largest(Path(dump), compiled.as_text() or "", _LARGEST),
        elements=parameter_count(definition.params),
        file_weights=parameter_count(
            {name: definition.extras[name] for name in definition.file_weights}
        ),
        frozen=parameter_count(definition.params) - parameter_count(trained),
        checkpoint=total_bytes(built.saved),
        samples=samples,
        unsharded=built.rule.unsharded(trained),
        batch_of=step_setup.batch_sentence(run),
        total=built.total if run.loop.epochs is None else None,
        compile_s=time.perf_counter() - began,
        jax=jax.__version__,
    )


def _devices(gpu: str, gpus_per_node: int, count: int) -> Any:
    of_a_node = min(count, gpus_per_node)
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=cards.target_config(cards.card(gpu)),
        topology=f"1x{count // of_a_node}x{of_a_node}",
    ).devices


def _sample_pixels(built: step_setup.StepSetup) -> dict[str, int]:
    """Returns the pixels of the images and of the clips that a validation makes."""
    pixels = {"image": 0, "clip": 0}
    if built.run.loop.eval_every is None:
        return pixels
    of_batch = build_eval_step(
        built.definition, built.rule, precision=built.run.precision, method="samples"
    )
    batch = built.run.model.batch_spec(step_setup.validation_batch_size(built.run))
    made = jax.eval_shape(of_batch, built.target.params, built.target.extras, batch)
    for sample in made.values():
        if sample.dtype == np.uint8:  # others are texts
            pixels["clip" if sample.ndim == 4 else "image"] += math.prod(sample.shape[:-1])
    return pixels


def dump_flags(folder: Path) -> str:
    """Returns the XLA_FLAGS that write the dump for :func:`largest` into ``folder``."""
    return f"--xla_dump_to={folder} --xla_dump_hlo_module_re=jit_train_step"


def largest(folder: Path, program: str, count: int) -> tuple[Temporary, ...]:
    """Returns the largest slots for temporaries, largest first."""
    dumps = sorted(folder.glob("*buffer-assignment.txt"))
    return temporaries(dumps[-1].read_text(), program)[:count] if dumps else ()


def temporaries(dump: str, program: str) -> tuple[Temporary, ...]:
    """Returns all slots for temporaries, largest first; see :func:`largest`."""
    source = Stacks(program).source
    makers = {match[1]: (int(match[3]), match[2]) for match in _INSTRUCTION.finditer(program)}
    slots: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for began in _TEMPORARIES.finditer(dump):
        end = dump.find("\nallocation ", began.end())
        for name, size, offset, shape in _VALUE.findall(dump[began.end() : end]):
            bare = re.sub(r"\{.*$", "", shape)
            slots.setdefault((int(size), int(offset)), []).append((name, bare))
    result = []
    for (size, _), values in sorted(slots.items(), key=lambda slot: -slot[0][0]):
        lines = (source(*makers[name]) for name, _ in values if name in makers)
        made_by = tuple(dict.fromkeys(line for line in lines if line is not None))
        result.append(Temporary(size, values[0][1], made_by))
    return tuple(result)
