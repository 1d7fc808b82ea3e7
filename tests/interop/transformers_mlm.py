"""Masked language models to and from transformers.

Run by name, because transformers is an optional extra:

    python -m pytest tests/interop/transformers_mlm.py
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import program
import pytest
import torch
import transformers
from flax import nnx
from models.small_params import random_params

from jaxtrain import config, main
from jaxtrain.data.text import tokenizer
from jaxtrain.inference import fill_mask
from jaxtrain.interop import huggingface, weights
from jaxtrain.models import mlm, modern_bert

pytestmark = pytest.mark.filterwarnings("default")  # other packages may warn
TEXT = "The Capital of France, is [MASK]: Paris?"
CORPUS = ("paris is the capital of france, and the capital is old. " * 20 + "\n\n") * 20


def tokenizer_of(kind: tokenizer.Kind) -> Any:
    return tokenizer.train([CORPUS], 300, kind)


MODELS: dict[str, Any] = {
    "BertForMaskedLM": mlm.Config(
        vocab_size=300, sequence_length=32, hidden=24, layers=3, heads=4, ff=40, dropout=0.2
    ),
    "ModernBertForMaskedLM": modern_bert.Config(
        vocab_size=300,
        sequence_length=32,
        hidden=24,
        layers=5,
        heads=4,
        ff=40,
        local_attention=8,
        global_base=500.0,
    ),
}


def export(
    folder: Path, kind: tokenizer.Kind = "wordpiece", family: str = "BertForMaskedLM"
) -> Any:
    model = MODELS[family]
    huggingface.check_target(folder)
    huggingface.write(folder, model, random_params(model), tokenizer_of(kind))
    return model


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model.eval()(input_ids=torch.from_numpy(ids.astype(np.int64))).logits
    return np.asarray(found)


def assert_same_probabilities(folder: Path, model: Any, ids: np.ndarray) -> None:
    masked = fill_mask.MaskedModel(folder)
    padded = np.zeros((1, masked.model.sequence_length), np.int32)
    padded[0, : ids.shape[1]] = ids
    theirs = torch.log_softmax(torch.from_numpy(logits_of(model, ids)), -1).numpy()[0]
    for position in range(ids.shape[1]):
        found = masked.log_chances(padded, np.array([position], np.int32))[0]
        np.testing.assert_allclose(found, theirs[position], atol=1e-4)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_transformers_loads_exported_models(
    tmp_path: Path, kind: Any, family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = export(tmp_path / "hf", kind, family)
    capfd.readouterr()
    loaded, report = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    said = capfd.readouterr()
    assert type(loaded) is getattr(transformers, family)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert "MISSING" not in said.out + said.err
    assert "newly initialized" not in said.out + said.err
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    own = tokenizer_of(kind)
    for text in (TEXT, "Überall  ist\tÄrger", "a" * 200, ""):
        assert words(text)["input_ids"] == own.encode(text).ids
    assert (words.mask_token_id, words.pad_token_id, words.unk_token_id) == (4, 0, 1)
    assert words.model_max_length == model.sequence_length
    ids = {f"{name}_token_id": n for name, n in (("pad", 0), ("cls", 2), ("sep", 3))}
    ids |= {"bos_token_id": None, "eos_token_id": None}
    assert {name: getattr(loaded.config, name) for name in ids} == ids
    with torch.no_grad():  # what the tokenizer makes is what the model takes
        loaded.eval()(**words(TEXT, return_tensors="pt"))
    assert_same_probabilities(tmp_path / "hf", loaded, np.array([own.encode(TEXT).ids]))
    loaded.save_pretrained(tmp_path / "again")
    before, after = (weights.load(tmp_path / name) for name in ("hf", "again"))
    assert after.model == before.model
    assert after.params.keys() == before.params.keys()
    for name, array in before.params.items():
        np.testing.assert_array_equal(after.params[name], array)


@pytest.mark.parametrize("family", MODELS)
def test_pseudo_log_likelihoods_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """As `evaluate` sums them for BLiMP: one token masked at a time."""
    export(tmp_path, "wordpiece", family)
    loaded, own = (
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path),
        tokenizer_of("wordpiece"),
    )
    texts = ("The capital of France is old.", "The capital of France is.", "old", "Is it Paris?")
    wanted = []
    for text in texts:
        total, ids = 0.0, own.encode(text).ids
        for place in range(1, len(ids) - 1):
            masked = np.array([ids])
            masked[0, place] = 4
            chances = torch.log_softmax(torch.from_numpy(logits_of(loaded, masked)[0]), -1)
            total += float(chances[place, ids[place]])
        wanted.append(total)
    assert np.std(wanted) > 1
    found = fill_mask.MaskedModel(tmp_path).log_probabilities(texts, 3)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("family", ["BertForMaskedLM", "BertForPreTraining"])
@pytest.mark.parametrize("shard", ["50GB", "20KB"])
def test_models_saved_by_transformers_are_imported(tmp_path: Path, family: str, shard: str) -> None:
    torch.manual_seed(0)
    settings = transformers.BertConfig(
        vocab_size=300,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    theirs = getattr(transformers, family)(settings)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size=shard)
    assert (tmp_path / "hf/model.safetensors.index.json").exists() == (shard == "20KB")
    tokenizer_of("wordpiece").save(str(tmp_path / "hf/tokenizer.json"))
    assert main.main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    found = weights.load(tmp_path / "ours").model
    assert (found.layers, found.heads, found.ff) == (2, 4, None)
    ids = np.array([[2, 9, 4, 17, 250, 3]])
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    head = theirs if family == "BertForMaskedLM" else None
    if head is None:
        head = transformers.BertForMaskedLM.from_pretrained(tmp_path / "hf")
    np.testing.assert_allclose(logits_of(again, ids), logits_of(head, ids), atol=1e-4)
    assert_same_probabilities(tmp_path / "ours", head, ids)
    types = torch.tensor([[0, 0, 0, 1, 1, 1]])
    with torch.no_grad():
        pairs, of_type_0 = (
            head.eval()(input_ids=torch.from_numpy(ids), token_type_ids=given).logits
            for given in (types, torch.zeros_like(types))
        )
        found = again(input_ids=torch.from_numpy(ids), token_type_ids=types).logits
    assert (pairs - of_type_0).abs().max() > 0.01
    torch.testing.assert_close(found, pairs, atol=1e-4, rtol=0)


def test_an_imported_model_can_be_trained_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training starts from its weights and uses its tokenizer."""
    export(tmp_path / "hf")
    corpus = program.write_corpus(tmp_path)
    said = program.train(
        tmp_path,
        *(*program.TINY_MLM, "--data.path", str(corpus), "--output-dir", "run"),
        *("--model.hidden", 24, "--model.layers", 3, "--model.heads", 4, "--model.ff", 40),
        *("--model.init_from", "hf", "--optim.peak_lr", 1e-6, "--loop.steps", 2),
        *("--checkpoint.every", 2),
    )
    assert f"tokenizer of model.init_from: {tmp_path}/hf/tokenizer.json" in said
    out = str(tmp_path / "out")
    assert main.main(["export", str(tmp_path / "run"), out, "--format", "hf"]) == 0
    assert "Read by transformers: it computes the same as jaxtrain" in capsys.readouterr().out
    assert "- Read by transformers" in (tmp_path / "out/README.md").read_text()
    before, after = (weights.load(tmp_path / name) for name in ("hf", "out"))
    for name, array in before.params.items():
        assert 0 < np.abs(after.params[name] - array).max() < 1e-4, name
    wanted = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    assert json.loads((tmp_path / "out/tokenizer.json").read_text()) == wanted
    assert config.to_dict(after.model)["vocab_size"] == 300
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")


RANDOM = [  # layers, heads, head width, feed-forward width, positions, tokens nearby, bases
    (4, 2, 8, 24, 40, 8, (160_000.0, 10_000.0)),
    (5, 3, 4, 16, 37, 12, (1000.0, 100.0)),
    (2, 1, 32, 48, 150, 128, (160_000.0, 10_000.0)),
]


@pytest.mark.parametrize("sizes", RANDOM)
def test_logits_and_gradients_are_those_of_modern_bert(sizes: Any, tmp_path: Path) -> None:
    """With documents of random lengths in one sequence, one of which is padded in theirs."""
    layers, heads, width, ff, length, local, bases = sizes
    rng = np.random.default_rng(layers)
    torch.manual_seed(0)
    settings = transformers.ModernBertConfig(
        vocab_size=60,
        hidden_size=heads * width,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
        local_attention=local,
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": base}
            for kind, base in zip(("full_attention", "sliding_attention"), bases, strict=True)
        },
        initializer_range=0.3,
        pad_token_id=0,
    )
    theirs = transformers.ModernBertForMaskedLM(settings).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name or "bias" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path)
    stored = weights.load(tmp_path)
    model: Any = stored.model
    assert (model.layers, model.global_base) == (layers, bases[0])

    ends = np.sort(rng.choice(np.arange(1, length), 3, replace=False))
    segments = np.digitize(np.arange(length), ends) + 1
    tokens = rng.integers(1, 60, length)
    weight = rng.standard_normal((length, 60)).astype(np.float32)
    longest = int(np.bincount(segments).max())
    rows = np.zeros((4, longest), np.int64)
    attended = np.zeros((4, longest), np.int64)
    for number in range(1, 5):
        document = tokens[segments == number]
        rows[number - 1, : len(document)], attended[number - 1, : len(document)] = document, 1
    padded = theirs(input_ids=torch.from_numpy(rows), attention_mask=torch.from_numpy(attended))
    wanted = padded.logits[torch.from_numpy(attended) == 1]
    (wanted * torch.from_numpy(weight)).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    # transformers gives the padding token's vector no gradient; no token here is padding.

    graph, params = nnx.split(model.build(nnx.Rngs(0)))
    flat = nnx.to_flat_state(params)
    values = [leaf.replace(jnp.asarray(stored.params[".".join(map(str, p))])) for p, leaf in flat]
    params = nnx.from_flat_state(zip((path for path, _ in flat), values, strict=True))

    def total(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graph, params).logits_at(
            jnp.asarray(tokens[None], jnp.int32),
            jnp.arange(length)[None],
            segments_BS=jnp.asarray(segments[None], jnp.int32),
        )[0]
        return (logits * weight).sum(), logits

    found, logits = jax.jit(jax.grad(total, has_aux=True))(params)
    np.testing.assert_allclose(logits, wanted.detach().numpy(), rtol=2e-5, atol=2e-5)
    ours = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(found)}
    assert ours.keys() == stored.params.keys()
    for name, gradient in model.from_weights(gradients, "gradients").items():
        error = np.linalg.norm(ours[name] - gradient) / np.linalg.norm(gradient)
        assert error < 2e-5, name
