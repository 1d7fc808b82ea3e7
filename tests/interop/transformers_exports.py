"""Exported folders in transformers, which ``.ci/run interop`` runs with its versions 4 and 5.

Run by name, because transformers is an optional extra:

    python -m pytest tests/interop/transformers_exports.py
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.small_params import random_params

from jaxtrain.data.text import tokenizer
from jaxtrain.interop import huggingface
from jaxtrain.models import llama, mlm, modern_bert

pytestmark = pytest.mark.filterwarnings("default")  # other packages may warn
TEXT = "le garçon a mangé, हिन्दी में"
MODELS: dict[str, Any] = {
    "BertForMaskedLM": mlm.Config.tiny(),
    "ModernBertForMaskedLM": modern_bert.Config.tiny(),
    "LlamaForCausalLM": llama.Config.tiny(),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_export_works_without_further_settings(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model takes what the tokenizer makes, and its special tokens are the tokenizer's."""
    causal = name == "LlamaForCausalLM"
    own = tokenizer.train([f"{TEXT} " * 9], 320, "byte_bpe" if causal else "wordpiece")
    size = own.get_vocab_size()
    model = dataclasses.replace(MODELS[name], vocab_size=size, sequence_length=64)
    huggingface.write(tmp_path, model, random_params(model), own)
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    load = getattr(transformers, name).from_pretrained
    loaded = load(tmp_path).eval()
    given = words(TEXT, return_tensors="pt")
    assert given["input_ids"][0].tolist() == own.encode(TEXT).ids
    assert words.decode(given["input_ids"][0], skip_special_tokens=True) == TEXT
    names = ("pad", "bos", "eos") if causal else ("pad", "bos", "eos", "cls", "sep")
    for token in names:
        assert getattr(loaded.config, f"{token}_token_id") == getattr(words, f"{token}_token_id")
    with torch.no_grad():
        if causal:
            written = loaded.generate(**given, max_new_tokens=2)
            assert words.decode(written[0], skip_special_tokens=True).startswith(TEXT)
        else:
            assert loaded(**given).logits.isfinite().all()
    said = capfd.readouterr()
    assert "unexpected" not in said.out + said.err
    assert "_token_id" not in said.err.replace("Setting `pad_token_id` to `eos_token_id`", "")
