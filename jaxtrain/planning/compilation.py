"""Compiles the real training step for GPUs that are described but not present."""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.experimental import topologies

from jaxtrain import config
from jaxtrain.ops import per_device
from jaxtrain.planning import buffers, cards, communication
from jaxtrain.sharding import make_mesh
from jaxtrain.training import step_setup
from jaxtrain.training.state import bytes_per_device, model_flops, parameter_count, total_bytes
from jaxtrain.training.step import build_eval_step
from jaxtrain.xla import flops, hlo, operations
from jaxtrain.xla.subprocess_worker import Send

_LARGEST = 5


def run(request: dict[str, Any], send: Send) -> None:
    """Sends the result of :func:`compile_step`; runs in the compiling process."""
    send(compile_step(request))


def compile_step(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles the step of a request.

    Args:
        request: :class:`jaxtrain.planning.planner.PlanRequest` as a dict, plus ``dump``, the folder
            for the compiler's dump, and ``estimate``: whether to compile for virtual CPU devices.

    Returns:
        ``parameters``, ``optimizer``, ``gradients``, ``batch``, ``temporaries``, ``outputs``,
        ``program``: bytes per device; ``replayed``: whether they are those of a step that is
        computed twice, whose outputs are a second state. ``largest``: temporaries.
        ``model_flops``, ``flops``: per step, over all devices. ``moved_bytes``: per step and
        device; None in an estimate, as are ``largest``, ``traffic``, ``attention`` (cuDNN attention
        calls per step, by direction) and ``kernels`` (:func:`jaxtrain.xla.hlo.kernels`).
        ``formula_bytes``, ``convolutions``, ``total`` (steps; None if that depends on the data),
        ``frozen`` (what ``model.freeze`` saves; None without it), ``constants`` (number of weights
        that are read from files and not trained), ``elements`` (number of parameters),
        ``checkpoint`` (bytes), ``samples`` ("image" and "clip" -> pixels per validation),
        ``unsharded`` (name -> shape), ``batch_of``, ``compile_s``,
        ``versions``, ``estimate``.

    Raises:
        InputError: the config cannot be built.
    """
    began = time.perf_counter()
    run = config.load(request["config"], request["overrides"])
    mesh = make_mesh(run.mesh, _devices(request, run))
    built = step_setup.build_without_data(run, mesh)
    platform = "cpu" if request["estimate"] else "cuda"
    with per_device.tracing(platform=platform):
        traced = built.trace_step()
    compiled = traced.lower(lowering_platforms=(platform,)).compile()
    text = compiled.as_text()
    of_gpu = _nothing() if request["estimate"] else _of_gpu(request, run, text)
    return {
        **_memory(built, compiled.memory_analysis()),
        **of_gpu,
        "model_flops": model_flops(run.model) * run.data.batch_size,
        "flops": flops.product_flops(traced.jaxpr),
        "convolutions": flops.has_convolutions(traced.jaxpr),
        "formula_bytes": _formula_bytes(built),
        "frozen": _frozen(built),
        "total": built.total if run.loop.epochs is None else None,
        "elements": parameter_count(built.definition.params),
        "constants": parameter_count(_constants(built)),
        "checkpoint": total_bytes(built.saved),
        "samples": _sample_pixels(built),
        "unsharded": built.rule.unsharded(_trained(built)),
        "batch_of": step_setup.batch_sentence(run),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "compile_s": time.perf_counter() - began,
        "estimate": request["estimate"],
    }


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


def _devices(request: dict[str, Any], run: config.Run) -> Any:
    """Returns devices to compile for: described GPUs, or virtual CPU devices for an estimate."""
    count = run.mesh.devices
    if request["estimate"]:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
        return jax.devices()
    of_a_node = min(count, request["gpus_per_node"])
    found = topologies.get_topology_desc(
        platform="cuda",
        target_config=cards.target_config(cards.card(request["gpu"])),
        topology=f"1x{count // of_a_node}x{of_a_node}",
    )
    return found.devices


def _of_gpu(request: dict[str, Any], run: config.Run, text: str) -> dict[str, Any]:
    """Findings that require the program compiled for the GPU."""
    card = cards.card(request["gpu"])
    collectives = hlo.collectives(text, run.mesh.devices)
    rows = communication.rows(collectives, run.mesh, card, request["gpus_per_node"])
    largest = buffers.largest(Path(request["dump"]), text, _LARGEST)
    return {
        "largest": [dataclasses.asdict(one) for one in largest],
        "moved_bytes": operations.moved_bytes(text),
        "attention": hlo.attention_calls(text),
        "kernels": hlo.kernels(text),
        "traffic": [dataclasses.asdict(row) for row in rows],
    }


def _nothing() -> dict[str, Any]:
    """Replaces :func:`_of_gpu`: a CPU program uses loops for matmuls, and wider dtypes."""
    names = ("largest", "moved_bytes", "attention", "kernels", "traffic")
    return dict.fromkeys(names)


def _trained(built: step_setup.StepSetup) -> dict[str, Any]:
    """Returns the parameters that are trained: shapes and shardings."""
    return built.definition.trained(built.target.params)


def _formula_bytes(built: step_setup.StepSetup) -> float:
    """Returns the bytes that each device sends per step by the formula."""
    run = built.run
    return communication.formula_bytes(
        _trained(built), _constants(built), built.rule, run.mesh, run.optim.accumulate
    )


def _constants(built: step_setup.StepSetup) -> dict[str, Any]:
    """Returns the weights that are read from files and not trained."""
    definition = built.definition
    return {name: definition.extras[name] for name in definition.constants}


def _frozen(built: step_setup.StepSetup) -> dict[str, Any] | None:
    """Returns what ``model.freeze`` saves on each device; None if nothing is frozen."""
    run, elements = built.run, parameter_count(_trained(built))
    if not built.definition.frozen:
        return None
    free = dataclasses.replace(run, model=dataclasses.replace(run.model, freeze=()))
    whole = step_setup.build_without_data(free, built.rule.mesh)
    sent = [_formula_bytes(one) for one in (whole, built)]
    return {
        "paths": list(run.model.freeze),
        "elements": parameter_count(built.definition.params) - elements,
        "optimizer_bytes": bytes_per_device(whole.target.opt) - bytes_per_device(built.target.opt),
        "sent_bytes": sent[0] - sent[1],
    }


def _memory(built: step_setup.StepSetup, analysis: Any) -> dict[str, Any]:
    """Returns bytes per device; those computed from shardings add up to the program's arguments."""
    parameters = bytes_per_device((built.target.params, built.target.extras))
    optimizer = bytes_per_device(built.target.opt)
    arguments = int(analysis.argument_size_in_bytes)
    outputs = int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    replayed = built.run.loop.replay_every is not None  # from a copy of the state
    gradients = bytes_per_device(_trained(built)) * (1 if built.run.optim.accumulate == 1 else 2)
    return {
        "parameters": parameters,
        "optimizer": optimizer,
        "batch": arguments - parameters - optimizer,
        "gradients": gradients,
        "temporaries": int(analysis.temp_size_in_bytes),
        "outputs": outputs + (bytes_per_device(built.target) if replayed else 0),
        "program": int(analysis.generated_code_size_in_bytes),
        "replayed": replayed,
    }
