"""Tests causal language models in Hugging Face folders against arrays from transformers.

`tests/interop/transformers_causal.py` generates these arrays and compares with transformers itself.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from models.small_causal import Stored
from models.small_params import random_params

from jaxtrain import main
from jaxtrain.data.text import specials, tokenizer
from jaxtrain.errors import InputError
from jaxtrain.interop import huggingface, weights
from jaxtrain.models import gpt, llama
from jaxtrain.training import state

FAMILIES: dict[str, Any] = {"llama": llama.Config, "nanochat": gpt.Config}
CORPUS = "It was the best of times, it was the worst of times.\n" * 20


@pytest.fixture(scope="module", params=FAMILIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stored(kind: str, checkout: Path) -> Stored:
    return Stored(checkout / f"tests/fixtures/hf_{kind}.npz")


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports a small model of ours."""
    path = tmp_path_factory.mktemp("export") / "hf"
    model = dataclasses.replace(FAMILIES[kind].tiny(), vocab_size=300)
    huggingface.write(path, model, random_params(model), tokenizer.train([CORPUS], 300, "byte_bpe"))
    return path


def test_logits_loss_and_gradients_match_transformers(kind: str, stored: Stored) -> None:
    model = FAMILIES[kind].from_settings(stored.settings, "config.json")
    definition = state.ModelDefinition(model.build)
    params = model.from_weights(stored.weights, "its arrays")
    tokens = jnp.asarray(stored.arrays["tokens"])
    targets = jnp.full_like(tokens, -1).at[:, :-1].set(tokens[:, 1:])
    batch = {"tokens": tokens, "targets": targets, "target_bytes": targets, "weight": jnp.ones(2)}

    def found_of(params: Any) -> Any:
        module = definition.module(params, {})
        total, weight = module.evaluate(batch)["loss"]
        return total / weight, module.logits(tokens)

    (loss, logits), grads = jax.jit(jax.value_and_grad(found_of, has_aux=True))(params)
    np.testing.assert_allclose(logits, stored.arrays["logits"], rtol=0, atol=2e-5)
    assert float(loss) == pytest.approx(float(stored.arrays["loss"]), abs=2e-5)
    outward = model.to_transformers
    theirs = outward(jax.device_get(grads))
    names = [name for name in stored.arrays if name.startswith("grad/")]
    assert len(names) == 4
    for name in names:
        want = stored.arrays[name]
        error = np.abs(theirs[f"{name.removeprefix('grad/')}.weight"] - want).max()
        assert error < 2e-5 * max(1, np.abs(want).max()), name
    assert outward(params).keys() == stored.weights.keys()


def test_a_written_folder_is_read_back_unchanged(kind: str, folder: Path) -> None:
    found = weights.load(folder)
    tiny = dataclasses.replace(FAMILIES[kind].tiny(), vocab_size=300)
    assert found.model.to_settings() == tiny.to_settings()
    params = random_params(tiny)
    assert found.params.keys() == params.keys()
    for name, array in params.items():
        np.testing.assert_array_equal(found.params[name], array)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    assert (told["bos_token"], told["eos_token"]) == (specials.CAUSAL[0],) * 2
    assert not {"cls_token", "mask_token", "pad_token"} & told.keys()
    settings = json.loads((folder / "config.json").read_text())
    assert [settings[f"{n}_token_id"] for n in ("bos", "eos", "pad")] == [0, 0, None]


def test_import_and_export_change_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["import", str(folder), str(tmp_path / "in")]) == 0
    assert "ForCausalLM of 2 layers" in capsys.readouterr().out
    out = str(tmp_path / "out")
    assert main.main(["export", str(tmp_path / "in"), out, "--format", "hf"]) == 0
    for path in folder.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_tokenizer_without_a_beginning_token_is_refused(kind: str, tmp_path: Path) -> None:
    words = tokenizer.wordpiece({word: i for i, word in enumerate([*specials.NAMES, "paris"])})
    model = FAMILIES[kind].tiny()
    with pytest.raises(InputError, match=r"no special token that begins a document"):
        huggingface.write(tmp_path / "hf", model, random_params(model), words)


def test_a_run_must_match_the_imported_parameters(kind: str, folder: Path) -> None:
    model = weights.load(folder).model
    expected = state.ModelDefinition(model.build).params
    params, notes = weights.params_for(folder, model, expected)
    assert params.keys() == expected.keys()
    assert notes == []
    other = dataclasses.replace(model, norm_eps=0.5)
    with pytest.raises(InputError, match=r"trained with model.norm_eps=.* set --model.norm_eps"):
        weights.params_for(folder, other, expected)
    other = dataclasses.replace(model, heads=4 if kind == "nanochat" else 2)
    with pytest.raises(InputError, match=r"trained with model.heads="):
        weights.params_for(folder, other, expected)


# ---- unsupported architectures ------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0}
BY_LAYER = {"full_attention": {"rope_type": "default", "rope_theta": 500.0}}
OTHERS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "both": [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, r"type='linear' of its rotary"),
        ({"rope_parameters": LLAMA3}, r"rope_type='llama3' of its rotary .*; factor=8.0"),
        ({"rope_parameters": BY_LAYER}, r"full_attention=\{'rope_type'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5"),
        ({"attention_bias": True}, r"attention_bias=True \(here False\)"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' \(here '(silu|relu2)'\)"),
        ({"sliding_window": 512}, r"sliding_window=512 \(here None\)"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"with 'sliding_attention'"),
        ({"head_dim": 16}, r"head_dim=16 \(here hidden_size / num_attention_heads\)"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config="),
        ({"hidden_size": None}, r"'hidden_size' is missing"),
    ],
    "llama": [
        ({"mlp_bias": True}, r"mlp_bias=True"),
        ({"tie_word_embeddings": False}, r"tie_word_embeddings=False \(here True\)"),
        ({"tie_word_embeddings": None}, r"tie_word_embeddings=False \(here True\)"),
    ],
    "nanochat": [
        ({"tie_word_embeddings": True}, r"tie_word_embeddings=True"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30.0 \(here 15.0\)"),
        ({"rope_parameters": {"rope_theta": 100_000.0}}, r"rope_theta=100000.0 \(here 10000.0\)"),
        ({"intermediate_size": 100}, r"intermediate_size=100 \(here 128\)"),
    ],
}


def test_unsupported_settings_are_refused_by_name(kind: str, stored: Stored) -> None:
    for changes, message in OTHERS["both"] + OTHERS[kind]:
        content = {n: v for n, v in stored.settings.items() if changes.get(n, v) is not None}
        content |= {n: v for n, v in changes.items() if v is not None}
        with pytest.raises(InputError, match=rf"there/config.json: .*{message}"):
            FAMILIES[kind].from_settings(content, "there/config.json")


def test_settings_of_older_versions_are_read(stored: Stored, kind: str) -> None:
    content = {n: v for n, v in stored.settings.items() if n not in ("rope_parameters", "head_dim")}
    base = 10_000.0 if kind == "nanochat" else 777.0
    older = content | {"rope_theta": base, "rope_scaling": None, "num_key_value_heads": None}
    model = FAMILIES[kind].from_settings(older, "config.json")
    settings = model.to_settings()
    assert (settings["rope_theta"], settings["num_key_value_heads"]) == (base, 4)


def test_fields_derived_from_depth_stay_unset() -> None:
    model = gpt.Config(vocab_size=300, sequence_length=16, depth=2)
    assert gpt.Config.from_settings(model.to_settings(), "x") == model
    model = dataclasses.replace(model, width=96, heads=3, kv_heads=1)
    assert gpt.Config.from_settings(model.to_settings(), "x") == model


# ---- arrays -------------------------------------------------------------------------------------


def changed(folder: Path, to: Path, **arrays: Any) -> Path:
    """Copies a folder with other arrays; None removes an array."""
    shutil.copytree(folder, to)
    found: dict[str, Any] = safetensors.numpy.load_file(folder / "model.safetensors") | arrays
    kept = {name: array for name, array in found.items() if array is not None}
    safetensors.numpy.save_file(kept, to / "model.safetensors")
    return to


def test_rotary_tables_and_tied_output_weights_are_skipped(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    table = safetensors.numpy.load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    tied = {"lm_head.weight": table} if kind == "llama" else {}
    found = weights.load(changed(folder, tmp_path / "more", **angles, **tied)).params
    for name, array in weights.load(folder).params.items():
        np.testing.assert_array_equal(found[name], array)
    if kind == "llama":
        only = {"model.embed_tokens.weight": None, **tied}
        found = weights.load(changed(folder, tmp_path / "alias", **only)).params
        np.testing.assert_array_equal(found["embedding.table"], table)
        other = changed(folder, tmp_path / "untied", **{"lm_head.weight": table + 1})
        with pytest.raises(InputError, match=r"lm_head.weight differs from model.embed_tokens"):
            weights.load(other)


def test_one_file_of_arrays(kind: str, folder: Path) -> None:
    """NanoChat's arrays determine its size, with heads of 128; Llama's leave its heads open."""
    path = folder / "model.safetensors"
    if kind == "llama":
        with pytest.raises(InputError, match=r"sizes of the model do not follow"):
            weights.load(path, "llama")
    else:
        model = weights.load(path, "gpt").model
        assert (model.depth, model.hidden, model.query_heads) == (2, 16, 1)
