"""A folder of transformers keeps its special tokens, settings, and templates."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from models.small_params import random_params, write_run

from jaxtrain import main
from jaxtrain.data import text
from jaxtrain.data.text import byte_level, specials, tokenizer, transformers_files
from jaxtrain.errors import InputError
from jaxtrain.inference.language_model import CausalModel
from jaxtrain.interop import huggingface, weights
from jaxtrain.models import bert_weights, llama, mlm
from jaxtrain.storage import tensor_files

CORPUS = "It was the best of times, it was the worst of times\n" * 8
NAMES = ("<|endoftext|>", "<|startoftext|>", "<|eot|>")
VOCABULARY = 270
MODEL = dataclasses.replace(llama.Config.tiny(), vocab_size=VOCABULARY, dropout=0.0)
GENERATION = {"eos_token_id": [0, 2], "do_sample": True, "temperature": 0.6}
# ids of config.json, generation_config.json -> before a prompt, before a document, ends
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, tuple[Any, ...]]] = {
    "bos is not the first known name": (
        {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 2},
        None,
        ((1,), (0, 1), {0}),
    ),
    "no bos": ({"bos_token_id": None, "eos_token_id": 0}, None, ((), (0,), {0})),
    "several eos": ({"bos_token_id": 1, "eos_token_id": [2, 0]}, None, ((1,), (2, 1), {0, 2})),
    "generation": ({"bos_token_id": 1, "eos_token_id": 0}, GENERATION, ((1,), (0, 1), {0, 2})),
    "eos is bos": ({"bos_token_id": 1, "eos_token_id": 1}, None, ((1,), (1,), {1})),
    "no eos": ({"bos_token_id": 1, "eos_token_id": None}, None, ((1,), (1,), {1})),
    "neither": ({"eos_token_id": None}, None, ((0,), (0,), {0, 1, 2, *range(3, 9)})),
}


def folder_of(path: Path, case: str) -> Path:
    """Writes a folder as transformers does."""
    ids, generation, _ = CASES[case]
    content = byte_level.train([CORPUS], VOCABULARY).to_str()
    for old, new in zip(specials.CAUSAL, NAMES, strict=False):
        content = content.replace(old, new)
    words = tokenizers.Tokenizer.from_str(content)
    words.enable_padding(direction="left")
    words.enable_truncation(10, direction="left")
    huggingface.write(path, MODEL, random_params(MODEL), words)
    settings = json.loads((path / "config.json").read_text())
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        del settings[name]
    (path / "config.json").write_text(json.dumps(settings | ids))
    described = {"eos_token": "<|eot|>", "model_max_length": 10**30, "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    (path / "special_tokens_map.json").unlink()
    (path / "chat_template.jinja").write_text("{{ bos_token }}\u00e9\r\n")
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def assert_kept(folder: Path, exported: Path, case: str) -> None:
    settings = json.loads((exported / "config.json").read_text())
    ids = {name: value for name, value in settings.items() if name.endswith("_token_id")}
    assert ids == CASES[case][0]
    for name in ("tokenizer.json", *transformers_files.FILES):
        assert (exported / name).exists() == (folder / name).exists()
        if (folder / name).exists():
            assert (exported / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize("case", CASES)
def test_import_and_a_checkpoint_keep_ids_and_files(case: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", case)
    (tmp_path / "in").mkdir()
    assert main.main(["import", str(folder), str(tmp_path / "in")]) == 0
    assert_kept(folder, tmp_path / "in", case)

    (tmp_path / "text").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "text" / f"{name}.txt").write_text(f"It was {name}")
    data = text.Causal(path=str(tmp_path / "text"), batch_size=1, cache_dir=str(tmp_path / "cache"))
    model = dataclasses.replace(MODEL, init_from=str(tmp_path / "in"))
    opened = data.open(model, seed=0, say=lambda line: None)
    prompt, before, ends = CASES[case][2]
    tokens = opened.train.example(0, np.random.default_rng(0))["tokens"].tolist()
    assert tuple(tokens[: len(before)]) == before
    first = len(before) + len(byte_level.train([CORPUS], VOCABULARY).encode("It was a").ids) - 1
    assert tuple(tokens[first : first + len(before)]) == before  # the second document

    write_run(tmp_path / "run", MODEL, 3, random_params(MODEL), files=opened.files_to_keep)
    out = str(tmp_path / "out")
    assert main.main(["export", str(tmp_path / "run"), out, "--format", "hf"]) == 0
    assert_kept(folder, tmp_path / "out", case)
    for source in (folder, tmp_path / "run"):  # the others have the files of the folder
        model_there = CausalModel(source)
        words = model_there.encode("It was")
        assert tuple(words[: len(prompt)]) == prompt
        assert model_there._ends == ends
        assert model_there.begin == before[-1]


def test_a_generated_text_ends_only_at_an_eos(tmp_path: Path) -> None:
    model = CausalModel(folder_of(tmp_path / "hf", "generation"))
    (letter,) = model.encode("a")[1:]

    def written(*ids: int) -> str:
        return "".join(grown[0] for grown in model.texts(np.array([i], np.int32) for i in ids))

    assert written(letter, 1, 5, letter, 2, letter) == "aa"
    assert written(letter, 0, letter) == "a"


def test_a_shorter_model_limits_the_tokenizer(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "hf", "no bos") / "tokenizer.json"
    short = dataclasses.replace(MODEL, sequence_length=8)
    words = tokenizers.Tokenizer.from_file(str(source))
    huggingface.write(tmp_path / "out", short, random_params(short), words, source)
    described = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert described == {"eos_token": "<|eot|>", "model_max_length": 8, "add_bos_token": True}


@pytest.mark.parametrize("value", [True, "1", 0.5, {}, [[0]], [None], -1, 10**9])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_odd_ids_are_rejected_in_one_line(name: str, value: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", "generation")
    content = json.loads((folder / name).read_text()) | {"eos_token_id": value}
    content |= {"bos_token_id": value}
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"bos_token_id": None})
    )
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"(bos|eos)_token_id.*: use "):
        CausalModel(folder)


def test_token_type_1_is_kept_by_import_and_reported_by_a_run(tmp_path: Path) -> None:
    model = dataclasses.replace(mlm.Config.tiny(), vocab_size=60)
    words = tokenizer.wordpiece({name: i for i, name in enumerate((*specials.NAMES, "a"))})
    huggingface.write(tmp_path / "hf", model, random_params(model), words)
    tensors = tensor_files.read(tmp_path / "hf/model.safetensors")[0]
    types = np.random.default_rng(1).normal(size=(2, 16)).astype(np.float32)
    before = tensors | {bert_weights._TYPES: types}
    tensor_files.write(tmp_path / "hf/model.safetensors", before, {})
    assert main.main(["import", str(tmp_path / "hf"), str(tmp_path / "in")]) == 0
    after = tensor_files.read(tmp_path / "in/model.safetensors")[0]
    for row in range(2):
        np.testing.assert_allclose(
            after[bert_weights._TYPES][row] + after[bert_weights._POSITION],
            types[row] + before[bert_weights._POSITION],
            atol=1e-6,
        )
    shapes = {name: jnp.asarray(array) for name, array in random_params(model).items()}
    _, notes = weights.params_for(tmp_path / "hf", model, shapes)
    assert notes == [f"1 parameters in the source are not used, such as {bert_weights.TYPE_1}"]
    more = before | {bert_weights._TYPES: np.zeros((3, 16), np.float32)}
    tensor_files.write(tmp_path / "hf/model.safetensors", more, {})
    with pytest.raises(InputError, match=r"has 3 token types \(type_vocab_size\)"):
        weights.load(tmp_path / "hf")
