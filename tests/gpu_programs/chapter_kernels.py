"""The kernels that a chapter of benchmarks/gpu times, compiled for an H100; requires ``cuda12``.

The default suite does not collect this file. Run ``python -m pytest
tests/gpu_programs/chapter_kernels.py``.
"""

import jax
import jax.numpy as jnp
import pytest
from gpu import kernels
from gpu_programs.described_gpus import h100s

from jaxtrain.cost import hlo

SHARDING = jax.sharding.SingleDeviceSharding(h100s(1)[0])


def compiled(function: object, specs: kernels.Specs) -> str:
    placed = (jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=SHARDING) for spec in specs)
    lowered = jax.jit(function).trace(*placed).lower(lowering_platforms=("cuda",))
    return lowered.compile().as_text() or ""


@pytest.mark.parametrize("name", kernels.THIN | kernels.ENLARGING)
def test_every_convolution_is_one_call_of_cudnn(name: str) -> None:
    for function, specs in kernels.directions((kernels.THIN | kernels.ENLARGING)[name]).values():
        text = compiled(function, specs)
        counts = hlo.kernels(text)
        assert (counts["convolutions"], counts["other_convolutions"]) == (1, 0)
        assert "size=3x3" in text or "size=2x2" in text


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_the_mask_with_its_sum_is_one_kernel_of_triton() -> None:
    frames, height, width, channels = kernels.MASKED
    pair = (jax.ShapeDtypeStruct((frames * height * width, channels), jnp.bfloat16),) * 2
    device = h100s(1)[0].device_kind
    mesh = jax.sharding.AbstractMesh(
        (1,),
        ("x",),
        (jax.sharding.AxisType.Explicit,),
        abstract_device=jax.sharding.AbstractDevice(device, None, "gpu"),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        text = compiled(lambda y, grad: kernels.masked_by_pallas(y, grad, interpret=False), pair)
    assert text.count("triton") >= 1
