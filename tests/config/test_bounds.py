"""Values of a model config that would hang jaxtrain or exhaust its memory are refused."""

import dataclasses
import math
from typing import Any

import pytest

from jaxtrain.errors import InputError
from jaxtrain.models import gpt, llama, mlm, modern_bert, video_ae, wan_vae

MODELS: dict[str, Any] = {
    "gpt": gpt.Config.tiny(),
    "llama": llama.Config.tiny(),
    "mlm": mlm.Config.tiny(),
    "modern_bert": modern_bert.Config.tiny(),
    "video_ae": video_ae.Config.tiny(),
    "wan_vae": wan_vae.Config.tiny(),
}
SIZES = {
    "gpt": ("vocab_size", "sequence_length", "depth", "width", "heads", "kv_heads"),
    "llama": (*("vocab_size", "sequence_length", "hidden", "layers", "heads", "kv_heads", "ff"),),
    "mlm": ("vocab_size", "sequence_length", "hidden", "layers", "heads", "ff", "pad_id"),
    "modern_bert": ("hidden", "layers", "heads", "ff", "local_attention"),
    "video_ae": ("frames", "height", "width", "patch_size", "latent_channels", "encoder_width"),
    "wan_vae": ("frames", "height", "latent_channels", "encoder_width", "decoder_width", "chunk"),
}
FLOATS = {
    "gpt": ("norm_eps",),
    "llama": ("dropout", "norm_eps", "rotary_base"),
    "mlm": ("dropout", "attention_dropout", "mask_fraction"),
    "modern_bert": ("mask_fraction", "global_base", "local_base"),
    "video_ae": ("reconstruction_weight",),
    "wan_vae": ("reconstruction_weight",),
}


def pairs(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(model, name) for model, names in table.items() for name in names]


@pytest.mark.parametrize(("model", "name"), pairs(SIZES))
def test_a_size_is_a_bounded_whole_number(model: str, name: str) -> None:
    for value, message in (
        (10**9, f"model.{name}=1000000000: use at most "),
        (10**12, f"model.{name}=1000000000000: use at most "),
        (10**400, f"model.{name}=1000.*: use at most "),
        (-1, f"model.{name}=-1: use at least "),
        ("7", f"model.{name}='7': use a whole number"),
        (1.5, f"model.{name}=1.5: use a whole number"),
        (math.nan, f"model.{name}=nan: use a whole number"),
        (True, f"model.{name}=True: use a whole number"),
        ([1], rf"model.{name}=\[1\]: use a whole number"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            dataclasses.replace(MODELS[model], **{name: value})
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("model", "name"), pairs(FLOATS))
def test_a_number_is_finite_and_not_negative(model: str, name: str) -> None:
    for value in (math.nan, math.inf, -math.inf, -1.0, "1", None, [0.1], True):
        with pytest.raises(InputError, match=f"model.{name}="):
            dataclasses.replace(MODELS[model], **{name: value})


def test_a_fraction_is_below_one() -> None:
    message = r"model.dropout=1.0: use a number of at least 0 and below 1"
    with pytest.raises(InputError, match=message):
        dataclasses.replace(MODELS["mlm"], dropout=1.0)


@pytest.mark.parametrize("widths", [(10**9, 8, 8, 8), (8, 8, 8), (8, 8, 8, 0), (8, 8, 8, "8")])
def test_widths_of_the_decoder_are_bounded(widths: Any) -> None:
    with pytest.raises(InputError, match=r"model.decoder_widths="):
        dataclasses.replace(MODELS["video_ae"], decoder_widths=widths)
