"""Causal language models to and from transformers.

Run by name, because transformers is an optional extra:

    python -m pytest tests/interop/transformers_causal.py

To generate the arrays in `tests/fixtures/hf_*.npz`, which the ordinary suite compares with:

    python tests/interop/transformers_causal.py
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
import program
from models import small_causal

from jaxtrain import main
from jaxtrain.data.text import specials, tokenizer
from jaxtrain.inference.language_model import CausalModel
from jaxtrain.interop import huggingface, weights
from jaxtrain.models import gpt, llama
from jaxtrain.ops.sampling import Choice
from jaxtrain.training import state

pytestmark = pytest.mark.filterwarnings("default")  # other packages may warn
FIXTURES = Path(__file__).parents[1] / "fixtures"
CORPUS = ("It was the best of times, it was the worst of times; 1775!\n" * 20 + "\n\n") * 5
TEXTS = ("It was  the age\tof \u00dcbel\r\n\r\n 12345", "", "worst of times \U0001f642", " a")
SIZES = {"vocab_size": 300, "sequence_length": 32}
MODELS: dict[str, Any] = {
    "llama": llama.Config(**SIZES, hidden=48, layers=3, heads=6, kv_heads=2, ff=56),
    "nanochat": gpt.Config(**SIZES, depth=3, width=48, heads=6, kv_heads=2),
}
SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
SAVED = {  # configs of transformers, different from our defaults where possible
    "llama": transformers.LlamaConfig(
        **SMALL,
        tie_word_embeddings=True,
        intermediate_size=40,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "nanochat": transformers.NanoChatConfig(**SMALL, intermediate_size=128),
}
PARTS = {
    "llama": ("embed_tokens", "layers.1.self_attn.k_proj", "layers.0.mlp.up_proj", "norm"),
    "nanochat": (
        "embed_tokens",
        "layers.1.self_attn.k_proj",
        "layers.0.mlp.fc1",
        "layers.1.mlp.fc2",
    ),
}


def theirs(kind: str) -> Any:
    """A model of transformers with reproducible weights."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(SAVED[kind]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(small_causal.drawn(name, tuple(parameter.shape))))
    return model


def computed(kind: str) -> dict[str, np.ndarray]:
    """The arrays of a fixture."""
    model = theirs(kind)
    tokens = np.random.default_rng(1).integers(0, 60, (2, 24))
    found = model(input_ids=torch.from_numpy(tokens))
    loss = torch.nn.functional.cross_entropy(
        found.logits[:, :-1].flatten(0, 1), torch.from_numpy(tokens[:, 1:]).flatten()
    )
    loss.backward()
    parameters = dict(model.named_parameters())
    settings = json.loads(model.config.to_json_string(use_diff=True))
    del settings["transformers_version"]
    return {
        "settings": np.array(json.dumps(settings)),
        "params": np.array(json.dumps({n: list(p.shape) for n, p in parameters.items()})),
        "tokens": tokens.astype(np.int32),
        "logits": found.logits.detach().numpy(),
        "loss": loss.detach().numpy(),
    } | {f"grad/model.{n}": parameters[f"model.{n}.weight"].grad.numpy() for n in PARTS[kind]}


def ours_of(folder: Path, ids: np.ndarray) -> np.ndarray:
    found = weights.load(folder)
    module = state.ModelDefinition(found.model.build).module(found.params, {})
    return np.asarray(jax.jit(type(module).logits)(module, ids))


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model.eval()(input_ids=torch.from_numpy(ids.astype(np.int64))).logits
    return np.asarray(found)


def random_params(model: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.normal("norm" in name, 0.2, leaf.shape).astype(np.float32)
        for name, leaf in state.ModelDefinition(model.build).params.items()
    }


@pytest.mark.parametrize("kind", MODELS)
def test_the_fixtures_equal_the_results_of_transformers(kind: str) -> None:
    stored = np.load(FIXTURES / f"hf_{kind}.npz")
    found = computed(kind)
    assert set(found) == set(stored.files)
    for name, array in found.items():
        if array.dtype.kind == "U":
            assert str(array) == str(stored[name]), name
        else:
            np.testing.assert_allclose(array, stored[name], atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_loads_exported_models(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, own = MODELS[kind], tokenizer.train([CORPUS], 300, "byte_bpe")
    huggingface.write(tmp_path / "hf", model, random_params(model), own)
    capfd.readouterr()
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    said = capfd.readouterr()
    assert type(loaded).__name__ == model.to_settings()["architectures"][0]
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert "MISSING" not in said.out + said.err
    ids = np.random.default_rng(0).integers(0, 300, (2, 32))
    wanted = logits_of(loaded, ids)
    assert np.std(wanted) > 0.5
    np.testing.assert_allclose(ours_of(tmp_path / "hf", ids), wanted, atol=1e-4)

    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        assert words(text)["input_ids"] == own.encode(text).ids
        assert words.decode(words(text)["input_ids"], skip_special_tokens=True) == text
    assert (words.bos_token, words.bos_token_id, words.eos_token_id) == ("<|bos|>", 0, 0)
    assert words.model_max_length == 32
    assert (loaded.config.bos_token_id, loaded.generation_config.eos_token_id) == (0, 0)
    given = words("It was", return_tensors="pt")
    assert set(given) == {"input_ids", "attention_mask"}
    written = loaded.generate(**given, max_new_tokens=4)
    assert words.decode(written[0], skip_special_tokens=True).startswith("It was")


@pytest.mark.parametrize("kind", MODELS)
def test_probabilities_of_sentences_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """As `evaluate` sums them for BLiMP."""
    own = tokenizer.train([CORPUS], 300, "byte_bpe")
    huggingface.write(tmp_path, MODELS[kind], random_params(MODELS[kind]), own)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    texts = ("It was the best of times.", "It was the best of time.", "It", "worst \U0001f642")
    wanted = []
    for text in texts:
        ids = own.encode(text).ids  # with the begin token
        chances = torch.log_softmax(torch.from_numpy(logits_of(loaded, np.array([ids]))[0]), -1)
        wanted.append(sum(float(chances[n, one]) for n, one in enumerate(ids[1:])))
    assert np.std(wanted) > 1
    np.testing.assert_allclose(CausalModel(tmp_path).log_probabilities(texts, 3), wanted, atol=1e-4)


@pytest.mark.parametrize("shard", ["50GB", "20KB"])
@pytest.mark.parametrize("kind", MODELS)
def test_models_saved_by_transformers_are_read(kind: str, shard: str, tmp_path: Path) -> None:
    """Both its own models and ours, after it has loaded and saved them."""
    model = theirs(kind)
    model.save_pretrained(tmp_path / "own", max_shard_size=shard)
    assert (tmp_path / "own/model.safetensors.index.json").exists() == (shard == "20KB")
    ids = np.random.default_rng(0).integers(0, 60, (1, 24))
    np.testing.assert_allclose(ours_of(tmp_path / "own", ids), logits_of(model, ids), atol=1e-4)

    ours, words = MODELS[kind], tokenizer.train([CORPUS], 300, "byte_bpe")
    params = random_params(ours)
    huggingface.write(tmp_path / "first", ours, params, words)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        auto.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "again")
    assert main.main(["import", str(tmp_path / "again"), str(tmp_path / "in")]) == 0
    found = weights.load(tmp_path / "in")
    wanted = dataclasses.replace(ours, dropout=0.0) if kind == "llama" else ours
    assert found.model == wanted
    for name, array in params.items():
        np.testing.assert_array_equal(found.params[name], array)
    again = tokenizer.of_source(tmp_path / "in")
    for text in TEXTS:
        assert again.encode(text).ids == words.encode(text).ids


NAMES = ("<|endoftext|>", "<|startoftext|>", "<|eot|>")
IDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bos is not eos": ({"bos_token_id": 0, "eos_token_id": 1}, {}),
    "bos is not the first known name": ({"bos_token_id": 1, "eos_token_id": 0}, {}),
    "no bos": ({"bos_token_id": None, "eos_token_id": 0}, {}),
    "several eos": ({"bos_token_id": 0, "eos_token_id": [1, 2]}, {}),
    "generation": (
        {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
        {"eos_token_id": [1, 5], "do_sample": True, "temperature": 0.7, "top_p": 0.9},
    ),
}


@pytest.mark.parametrize("case", IDS)
def test_an_imported_folder_ends_where_transformers_ends(case: str, tmp_path: Path) -> None:
    """Text and loss are equal in transformers before and after, and here."""
    ids, generation = IDS[case]
    content = tokenizer.train([CORPUS], 300, "byte_bpe").to_str()
    for old, new in zip(specials.CAUSAL, NAMES, strict=False):
        content = content.replace(old, new)
    own = tokenizers.Tokenizer.from_str(content)
    own.post_processor = None
    vocabulary = 1 + max(own.get_vocab().values())
    settings = SMALL | {"vocab_size": vocabulary, "max_position_embeddings": 64} | ids
    torch.manual_seed(0)
    before = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**settings, tie_word_embeddings=True, intermediate_size=40)
    )
    with torch.no_grad():
        for name, parameter in before.named_parameters():
            drawn = small_causal.drawn(name, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(drawn) * (0.3 if "embed" in name else 1))
        before.model.embed_tokens.weight[:6] *= 3  # likely enough
    before.generation_config.update(**generation)
    before.save_pretrained(tmp_path / "hf")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own,
        eos_token=NAMES[1],
        pad_token=NAMES[2],
        chat_template="{{ eos_token }}",
    )
    fast.save_pretrained(tmp_path / "hf")
    assert main.main(["import", str(tmp_path / "hf"), str(tmp_path / "in")]) == 0

    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in").eval()
    for name in ("config", "generation_config"):
        first, second = (getattr(model, name).to_dict() for model in (before, after))
        changed = {key for key in first if first[key] != second.get(key)}
        assert changed <= {"_name_or_path", "architectures", "transformers_version"}
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    assert words.init_kwargs.keys() == (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").init_kwargs.keys()
    )
    assert (words.eos_token, words.pad_token, words.bos_token) == (NAMES[1], NAMES[2], None)
    assert words.chat_template == "{{ eos_token }}"
    ours = CausalModel(tmp_path / "in")
    lengths = set()
    eos = before.generation_config.eos_token_id
    for prompt in [*"abcdefghij", "It was", "worst of", "17"]:
        begun = ours.encode(prompt)
        given = torch.tensor([begun])
        texts = [
            model.eval().generate(given, do_sample=False, max_new_tokens=30)[0].tolist()
            for model in (before, after)
        ]
        assert texts[0] == texts[1]
        new = texts[0][len(begun) :]
        lengths.add(len(new))
        drawn = ours.ids(begun, tokens=30, choice=Choice(temperature=0.0))
        mine = [int(one[0]) for one in drawn]
        assert mine[: len(new)] == new
        kept = (np.array([one], np.int32) for one in mine)
        shown = "".join(grown[0] for grown in ours.texts(kept))
        ends = eos if isinstance(eos, list) else [eos]
        assert shown == own.decode([one for one in new if one not in ends])
    assert min(lengths) < 30  # some texts end
    expected = own.encode(CORPUS[:40], add_special_tokens=False).ids
    begin = ids["bos_token_id"] if ids["bos_token_id"] is not None else ids["eos_token_id"]
    logits = logits_of(before, np.array([[begin, *expected]]))[0, :-1]
    wanted = torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.tensor(expected))
    found = ours.score([CORPUS[:40]], rows=1, max_tokens=None, each=lambda done, count: None)
    assert found.loss == pytest.approx(float(wanted), abs=1e-4)


def test_training_starts_from_a_model_saved_by_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = dataclasses.replace(MODELS["llama"], layers=1)
    corpus = program.write_corpus(tmp_path)
    words = tokenizer.train([path.read_text() for path in corpus.rglob("*.txt")], 300, "byte_bpe")
    huggingface.write(tmp_path / "first", ours, random_params(ours), words)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        auto.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "hf")
    said = program.train(
        tmp_path,
        *("--config", "a6000_medium", "--data.path", str(corpus), "--output-dir", "run"),
        *(f"--model.{f}={getattr(ours, f)}" for f in ("vocab_size", "sequence_length", "hidden")),
        *(f"--model.{f}={getattr(ours, f)}" for f in ("layers", "heads", "kv_heads", "ff")),
        *("--model.init_from", "hf", "--optim.peak_lr", 1e-6, "--optim.warmup_steps", 0),
        *("--data.batch_size", 8, "--data.workers", 0, "--loop.steps", 2, "--loop.eval_every", 2),
        *("--loop.eval_examples", 8, "--checkpoint.every", 2, "--precision", "float32"),
    )
    assert f"tokenizer of model.init_from: {tmp_path}/hf/tokenizer.json" in said
    out = str(tmp_path / "out")
    assert main.main(["export", str(tmp_path / "run"), out, "--format", "hf"]) == 0
    assert "Read by transformers: it computes the same as jaxtrain" in capsys.readouterr().out
    assert "- Read by transformers" in (tmp_path / "out/README.md").read_text()
    before, after = (weights.load(tmp_path / name) for name in ("hf", "out"))
    for name, array in before.params.items():
        assert 0 < np.abs(after.params[name] - array).max() < 1e-4, name
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


if __name__ == "__main__":
    for kind in SAVED:
        np.savez_compressed(FIXTURES / f"hf_{kind}.npz", **computed(kind))
