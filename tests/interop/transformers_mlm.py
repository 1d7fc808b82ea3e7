"""Masked language models to and from transformers.

Run by name, because transformers is an optional extra:

    python -m pytest tests/interop/transformers_mlm.py
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import program
import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
import test_masked_text as ours

from jaxtrain import config, main
from jaxtrain.data.text import tokenizer
from jaxtrain.inference import fill_mask
from jaxtrain.interop import huggingface, weights
from jaxtrain.models import mlm

pytestmark = pytest.mark.filterwarnings("default")  # other packages may warn
TEXT = "The Capital of France, is [MASK]: Paris?"
CORPUS = ("paris is the capital of france, and the capital is old. " * 20 + "\n\n") * 20


def tokenizer_of(kind: tokenizer.Kind) -> Any:
    return tokenizer.train([CORPUS], 300, kind)


def export(folder: Path, kind: tokenizer.Kind = "wordpiece") -> mlm.Config:
    model = mlm.Config(
        vocab_size=300, sequence_length=32, hidden=24, layers=3, heads=4, ff=40, dropout=0.2
    )
    huggingface.check_target(folder)
    huggingface.write(folder, model, ours.params_of(model), tokenizer_of(kind))
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


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_transformers_loads_exported_models(
    tmp_path: Path, kind: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    model = export(tmp_path / "hf", kind)
    capfd.readouterr()
    loaded, report = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    said = capfd.readouterr()
    assert isinstance(loaded, transformers.BertForMaskedLM)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert "MISSING" not in said.out + said.err
    assert "newly initialized" not in said.out + said.err
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    own = tokenizer_of(kind)
    for text in (TEXT, "Überall  ist\tÄrger", "a" * 200, ""):
        assert words(text)["input_ids"] == own.encode(text).ids
    assert (words.mask_token_id, words.pad_token_id, words.unk_token_id) == (4, 0, 1)
    assert words.model_max_length == model.sequence_length
    assert_same_probabilities(tmp_path / "hf", loaded, np.array([own.encode(TEXT).ids]))


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
    assert "tokenizer of model.init_from: hf/tokenizer.json" in said
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
