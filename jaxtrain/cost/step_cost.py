"""What a step costs: FLOPs, bytes moved, communication, and memory, from its programs."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from jaxtrain.cost import flops, hlo, operations

CUDNN = 0.5 * 2**30
"""Assumed: bytes of convolution workspaces. cuDNN chooses its algorithms on the GPU when the
program starts."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind, dtype, and group, summed over a step.

    Attributes:
        kind: such as "all-gather".
        dtype: of the arrays; several are joined by "+".
        axis: mesh axes along which the members of a group differ, joined by "+".
        crosses_nodes: whether a group includes GPUs of several nodes.
        count: collectives per step.
        wire_bytes: bytes sent per step and device, with ring algorithms.
        overlapped: fraction of the bytes whose collective overlaps computation.
    """

    kind: str
    dtype: str
    axis: str
    crosses_nodes: bool
    gpus_of_node: int
    count: int
    wire_bytes: float
    overlapped: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a training step costs.

    Attributes:
        model_flops: that the model needs, over all devices; MFU counts these.
        flops: of the step's matmuls and convolutions, rematerialization included; likewise.
        work: of the instructions of a device's program (:func:`jaxtrain.cost.operations.work`).
        arguments: bytes of a device's state and batch.
        temporaries: bytes of a device at the peak.
        outputs: bytes of a device that do not replace an argument.
        program: bytes of the program, as far as the compiler counts them.
        kernels: how the expensive operations are computed (:func:`jaxtrain.cost.hlo.kernels`), and
        traffic: what a device sends; both None if not read (:meth:`of`).
    """

    devices: int
    model_flops: float
    flops: float
    convolutions: bool
    work: tuple[operations.Work, ...]
    arguments: int
    temporaries: int
    outputs: int
    program: int
    kernels: dict[str, int] | None
    traffic: tuple[Traffic, ...] | None

    @classmethod
    def of(
        cls,
        jaxpr: Any,
        compiled: jax.stages.Compiled,
        mesh: jax.sharding.Mesh,
        *,
        model_flops: float,
        gpus_per_node: int | None = None,
    ) -> Self:
        """Reads a step's programs.

        Args:
            gpus_per_node: devices in each node; None reads neither kernels nor communication, which
                are those of a program for GPUs.

        Raises:
            ValueError: XLA wrote a collective in an unknown notation.
        """
        text, memory = compiled.as_text() or "", compiled.memory_analysis()
        assert memory is not None, "CPUs and GPUs report it"
        kernels = rows = None
        if gpus_per_node is not None:
            kernels = hlo.kernels(text)
            rows = traffic(hlo.collectives(text, mesh.size), mesh.shape, gpus_per_node)
        return cls(
            devices=mesh.size,
            model_flops=model_flops,
            flops=flops.product_flops(jaxpr),
            convolutions=flops.has_convolutions(jaxpr),
            work=operations.work(text),
            arguments=int(memory.argument_size_in_bytes),
            temporaries=int(memory.temp_size_in_bytes),
            outputs=int(memory.output_size_in_bytes - memory.alias_size_in_bytes),
            program=int(memory.generated_code_size_in_bytes),
            kernels=kernels,
            traffic=rows,
        )

    @property
    def moved_bytes(self) -> float:
        """Bytes that the instructions of a device's program read and write."""
        return sum(row.count * row.moved_bytes for row in self.work)

    @property
    def planned_bytes(self) -> int:
        """Bytes that a device needs, according to the compiler."""
        return self.arguments + self.temporaries + self.outputs

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends per step."""
        return sum(row.wire_bytes for row in self.traffic or ())


def traffic(
    collectives: Sequence[hlo.Collective], mesh: Mapping[str, int], gpus_per_node: int
) -> tuple[Traffic, ...]:
    """Sums collectives of the same kind, dtype, and group; the largest first.

    Args:
        mesh: axis -> size; devices are numbered in row-major order.
    """
    groups: dict[tuple[str, str, str, bool], list[hlo.Collective]] = {}
    for each in collectives:
        dtype = "+".join(sorted({array.dtype for array in each.outputs}))
        crosses = any(
            len({device // gpus_per_node for device in group}) > 1 for group in each.groups
        )
        key = (each.kind, dtype, axis_of(each.groups, mesh), crosses)
        groups.setdefault(key, []).append(each)
    rows = []
    for (kind, dtype, axis, crosses), members in groups.items():
        sent = sum(each.times * each.wire_bytes for each in members)
        hidden = sum(each.times * each.wire_bytes for each in members if each.overlapped)
        nodes = [device // gpus_per_node for device in members[0].groups[0]]
        rows.append(
            Traffic(
                kind,
                dtype,
                axis,
                crosses,
                gpus_of_node=nodes.count(nodes[0]),
                count=sum(each.times for each in members),
                wire_bytes=sent,
                overlapped=hidden / sent if sent else 0.0,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.wire_bytes))


def axis_of(groups: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> str:
    """Returns the mesh axes along which the members of a group differ, joined by "+"."""
    places = np.unravel_index(np.arange(int(np.prod([*mesh.values()]))), tuple(mesh.values()))
    differing = [
        name
        for name, place in zip(mesh, places, strict=True)
        if any(len({int(place[device]) for device in group}) > 1 for group in groups)
    ]
    return "+".join(differing) or "none"
