"""The operations of a model are those that its matmuls need, whatever the program recomputes."""

import dataclasses
import math
from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.models import gpt, llama, mlm, video_ae
from jaxtrain.training.model_flops import model_flops


def of_gpt(m: gpt.Config) -> int:
    s, d, v = m.sequence_length, m.hidden, m.vocab_size
    layer = 4 * s * d * (d + m.shared_heads * m.head_width) + 16 * s * d * d + 4 * s * s * d
    return m.depth * layer + 2 * s * d * v


def of_llama(m: llama.Config) -> int:
    s, d, v = m.sequence_length, m.hidden, m.vocab_size
    layer = 4 * s * d * (d + m.kv_heads * m.head_width) + 6 * s * d * m.ff + 4 * s * s * d
    return m.layers * layer + 2 * s * d * v


def of_mlm(m: mlm.Config) -> int:
    s, d, v = m.sequence_length, m.hidden, 64 * math.ceil(m.vocab_size / 64)
    layer = 8 * s * d * d + 4 * s * d * m.ff_width + 4 * s * s * d
    return m.layers * layer + m.predicted * (2 * d * d + 2 * d * v)


MODELS: tuple[tuple[Any, Any], ...] = (
    (gpt.Config.tiny(), of_gpt),
    (dataclasses.replace(gpt.Config.tiny(), kv_heads=1), of_gpt),
    (llama.Config.tiny(), of_llama),
    (mlm.Config.tiny(), of_mlm),
    *((config.named(name).model, of_gpt) for name in ("gpt_32gb_conservative", "gpt_h100_8")),
    (config.named("a6000_medium").model, of_llama),
    (config.named("demo_mlm").model, of_mlm),
)


@pytest.mark.parametrize(("model", "forward"), MODELS)
@pytest.mark.parametrize("remat", ["none", "block"])
def test_a_language_models_operations_follow_from_its_sizes(
    model: Any, forward: Any, remat: str
) -> None:
    """Each matmul of the forward pass has two gradients that cost the same."""
    assert model_flops(dataclasses.replace(model, remat=remat)) == 3 * forward(model)


def test_recomputation_is_not_counted_for_videos() -> None:
    tiny = video_ae.Config.tiny()
    assert model_flops(dataclasses.replace(tiny, remat="block")) == model_flops(tiny)
