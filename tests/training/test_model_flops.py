"""The operations of a model are those that its matmuls need, whatever the program recomputes."""

import dataclasses
import math
from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.models import gpt, llama, mlm, modern_bert, video_ae
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


def of_nanochat(m: gpt.Config) -> int:
    """nanochat's own count for a sequence (estimate_flops at 92d63d4), all passes.

    It takes 6 operations for each parameter of matrices, and 12 for each query, key, and channel,
    with the keys of the layer's window.
    """
    s, d = m.sequence_length, m.hidden
    short = -(-s // 4 // 128) * 128
    windows = [s if m.extras.window(n) is None else short for n in range(m.depth)]
    return s * (6 * m.scaling_parameters + sum(12 * d * window for window in windows))


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("name", ["gpt_2026_h100_1", "gpt_2026_h100_8"])
def test_windows_are_counted_as_in_nanochat(name: str, windows: bool) -> None:
    model = config.named(name).model
    if not windows:
        model = dataclasses.replace(model, window_pattern=None)
    assert model_flops(model) == pytest.approx(of_nanochat(model), rel=5e-3)


def test_local_attention_counts_the_keys_nearby() -> None:
    """A token of a local layer sees half of `local_attention` on each side, and itself."""
    m = modern_bert.Config.tiny()
    s, d, v = m.sequence_length, m.hidden, 64 * math.ceil(m.vocab_size / 64)
    keys = sum(s if m.is_global(n) else m.local_attention + 1 for n in range(m.layers))
    forward = m.layers * s * (8 * d * d + 6 * d * m.ff) + 4 * s * d * keys
    forward += m.predicted * (2 * d * d + 2 * d * v)
    assert model_flops(m) == 3 * forward


def test_recomputation_is_not_counted_for_videos() -> None:
    tiny = video_ae.Config.tiny()
    assert model_flops(dataclasses.replace(tiny, remat="block")) == model_flops(tiny)
