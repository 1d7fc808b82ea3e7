"""Untrusted folders of transformers are read, or rejected with one line."""

import dataclasses
import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from models.small_params import random_params

from jaxtrain.data.text import tokenizer
from jaxtrain.errors import InputError
from jaxtrain.interop import huggingface
from jaxtrain.models import from_file, gpt, llama, mlm, modern_bert
from jaxtrain.storage import tensor_files

MODELS: dict[str, Any] = {
    "bert": mlm.Config.tiny(),
    "llama": llama.Config.tiny(),
    "modernbert": modern_bert.Config.tiny(),
    "nanochat": gpt.Config.tiny(),
}
ODD: tuple[Any, ...] = (
    *(None, True, "7", [], [1], {}, {"a": 1}, -1, 0, 0.5, 10**9, 10**400, math.nan, math.inf),
    *(-math.inf, "x" * 10_000, "\x1b[2J"),
)


def settings(kind: str) -> dict[str, Any]:
    content: dict[str, Any] = MODELS[kind].to_settings()
    return content


def fields() -> list[tuple[str, str]]:
    return [(kind, name) for kind in MODELS for name in settings(kind)]


@pytest.mark.parametrize("kind", MODELS)
def test_an_export_has_what_transformers_guesses_otherwise(kind: str, tmp_path: Path) -> None:
    """Of a missing entry, 4.57 and 5.24 assume token types, and ids of a published ModernBERT."""
    masked = kind in ("bert", "modernbert")
    words = tokenizer.train(
        ["the words of a text " * 9], 300, "wordpiece" if masked else "byte_bpe"
    )
    model = dataclasses.replace(MODELS[kind], vocab_size=words.get_vocab_size())
    huggingface.write(tmp_path, model, random_params(model), words)
    content, described = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("config", "tokenizer_config")
    )
    types = ["token_type_ids"] if kind == "bert" else []
    assert described["model_input_names"] == ["input_ids", *types, "attention_mask"]
    ids = {name: value for name, value in content.items() if name.endswith("_token_id")}
    numbers = (0, None, None, 2, 3) if masked else (None, 0, 0)
    names = ("pad", "bos", "eos", "cls", "sep")
    assert ids == {f"{n}_token_id": i for n, i in zip(names, numbers, strict=False)}


def refusal(folder: Path, content: Any) -> str:
    """The error for a folder with this config.json; "" if it is accepted."""
    (folder / "config.json").write_text(json.dumps(content))
    try:
        huggingface.model(folder)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("kind", "name"), fields())
def test_an_odd_value_is_accepted_or_reported_in_one_line(
    kind: str, name: str, tmp_path: Path
) -> None:
    content = settings(kind)
    said = [refusal(tmp_path, content | {name: value}) for value in ODD]
    del content[name]
    said.append(refusal(tmp_path, content))
    assert all(not line or line.isprintable() for line in said)
    assert max(map(len, said)) < 2000


@pytest.mark.parametrize(
    "kind", [[], {}, 7, None, "gpt2", "os", "jaxtrain.models.mlm", "\x1b[2J", "x" * 10_000]
)
def test_unknown_kinds_are_rejected_and_import_nothing(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert huggingface.is_model_folder(tmp_path)
    imported: list[str] = []
    real = importlib.import_module

    def recorded(name: str) -> ModuleType:
        imported.append(name)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", recorded)
    with pytest.raises(InputError, match="use one of bert, llama, modernbert, nanochat") as caught:
        huggingface.model(tmp_path)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert set(imported) == {f"jaxtrain.models.{name}" for name in from_file._modules()}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"model_type"',
        b"\xff{}",
        b'{"model_type": "\\ud800"}',
        b"[" * 10**7,
        b'{"model_type": ' * 10**5,
        b" " * 2**25,
    ],
    ids=lambda content: ascii(content[:20]),
)
def test_an_invalid_config_json_is_not_recognized(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert not huggingface.is_model_folder(tmp_path)
    with pytest.raises(InputError, match=r"config.json"):
        huggingface.model(tmp_path)


@pytest.mark.parametrize(
    "found",
    [
        *(None, 7, [], "x", {}, {"a": 7}, {"a": None}, {"a": ["x.safetensors"]}, {"a": {}}),
        *({"a": "../x.safetensors"}, {"a": "/abs/x.safetensors"}, {"a": "b/x.safetensors"}),
        *({"a": ".."}, {"a": ""}, {"a": "x\0.safetensors"}, {"a": "x.bin"}, {"a": "config.json"}),
    ],
    ids=str,
)
def test_an_index_may_list_only_files_of_its_folder(found: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tensor_files.write(tmp_path / "x.safetensors", {"a": np.zeros(1, np.float32)}, {})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": found}))
    with pytest.raises(InputError, match=r"index.json(: its weight_map lists| lists no files)"):
        huggingface.tensors(folder)


def test_damaged_indexes_are_rejected_and_complete_ones_read(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for content in (b"{", b"[1]", b"[" * 10**6, b"\xff", b"{}"):
        index.write_bytes(content)
        with pytest.raises(InputError, match=r"index.json"):
            huggingface.tensors(tmp_path)
    for name in ("1", "2"):
        tensor_files.write(tmp_path / f"{name}.safetensors", {name: np.zeros(1, np.float32)}, {})
    index.write_text(json.dumps({"weight_map": {"1": "1.safetensors", "2": "2.safetensors"}}))
    assert huggingface.tensors(tmp_path).keys() == {"1", "2"}


@pytest.mark.parametrize(
    ("words", "keys"),
    [((0, 2**40), (4, 4)), ((4,), (4, 4)), ((4, 4), ()), ((4, 0), (4, 4)), ((4, 3), (0, 3))],
)
def test_odd_shapes_of_a_gpt_are_rejected(words: Any, keys: Any) -> None:
    tensors = {
        "lm_head.weight": np.broadcast_to(np.float32(0), words),
        "transformer.h.0.attn.c_k.weight": np.broadcast_to(np.float32(0), keys),
    }
    with pytest.raises(
        InputError, match=r"x does not have weights of this model|x is not a GPT of this kind"
    ):
        gpt.Config.guess(tensors, "x")
