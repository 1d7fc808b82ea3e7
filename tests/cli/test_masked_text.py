"""Masked language models: ``fill``, ``evaluate`` on a text, and Hugging Face folders."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from models.small_params import random_params

from jaxtrain import main
from jaxtrain.data import text
from jaxtrain.data.text import specials, tokenizer
from jaxtrain.errors import InputError
from jaxtrain.inference import fill_mask
from jaxtrain.interop import huggingface, weights
from jaxtrain.models import mlm, modern_bert
from jaxtrain.storage import tensor_files

VOCABULARY = [*specials.NAMES, "paris", "is", "the", "capital", "of", "france"]
TEXT = "Paris is the capital of France, the capital is Paris " * 3


def run(*arguments: Any) -> int:
    return main.main([*map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small exported BERT."""
    return exported(tmp_path_factory.mktemp("export") / "hf", mlm.Config.tiny())


def exported(path: Path, tiny: Any) -> Path:
    model = dataclasses.replace(tiny, vocab_size=len(VOCABULARY), ff=24)
    huggingface.check_target(path)
    wordpiece = tokenizer.wordpiece({word: i for i, word in enumerate(VOCABULARY)})
    huggingface.write(path, model, random_params(model), wordpiece)
    return path


@pytest.fixture(scope="module", params=["mlm", "modern_bert"])
def any_folder(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """An exported model of each kind."""
    if request.param == "mlm":
        return folder
    return exported(tmp_path_factory.mktemp("export") / "hf", modern_bert.Config.tiny())


@pytest.fixture(scope="module")
def masked(any_folder: Path) -> fill_mask.MaskedModel:
    return fill_mask.MaskedModel(any_folder)


def test_import_and_export_change_nothing(
    any_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_bert = json.loads((any_folder / "config.json").read_text())["model_type"] == "bert"
    layers = 2 if of_bert else 4
    assert run("import", any_folder, tmp_path / "in") == 0
    printed = capsys.readouterr().out
    assert f"{layers} layers, 2 heads, width 16, 11 tokens, 16 positions" in printed
    assert run("export", tmp_path / "in", tmp_path / "out", "--format", "hf") == 0
    # Token types: 2 x 16 parameters, which jaxtrain adds to its positions.
    parameters = "mlm (+32 that the exported" if of_bert else "modern_bert"
    assert f"parameters of {parameters}" in capsys.readouterr().out
    for path in any_folder.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert run("export", any_folder, tmp_path / "file.safetensors") == 0


def changed(folder: Path, to: Path, settings: dict[str, Any], **arrays: Any) -> Path:
    """Copies the folder with other settings and arrays; None removes an array."""
    shutil.copytree(folder, to)
    content = json.loads((folder / "config.json").read_text()) | settings
    (to / "config.json").write_text(json.dumps(content))
    found: dict[str, Any] = safetensors.numpy.load_file(folder / "model.safetensors") | arrays
    kept = {name: array for name, array in found.items() if array is not None}
    safetensors.numpy.save_file(kept, to / "model.safetensors")
    return to


def test_parameters_that_a_masked_lm_does_not_use_are_ignored(folder: Path, tmp_path: Path) -> None:
    """Also: old names, tied arrays, nonzero token types, more positions than needed."""
    theirs = safetensors.numpy.load_file(folder / "model.safetensors")
    norm = "bert.encoder.layer.1.output.LayerNorm"
    types = np.full((2, 16), 0.5, np.float32)
    other = changed(
        folder,
        tmp_path / "theirs",
        {"architectures": ["BertForPreTraining"]},
        **{
            "bert.pooler.dense.weight": np.zeros((16, 16), np.float32),
            "cls.seq_relationship.bias": np.zeros(2, np.float32),
            "bert.embeddings.position_ids": np.arange(16),
            "cls.predictions.decoder.weight": theirs["bert.embeddings.word_embeddings.weight"],
            "cls.predictions.decoder.bias": theirs["cls.predictions.bias"],
            "bert.embeddings.token_type_embeddings.weight": types,
            f"{norm}.weight": None,
            f"{norm}.gamma": theirs[f"{norm}.weight"],
        },
    )
    found, before = weights.load(other).params, weights.load(folder).params
    position = "embeddings.position"
    np.testing.assert_allclose(found[position], before[position] + 0.5)
    for name in before.keys() - {position}:
        np.testing.assert_array_equal(found[name], before[name])
    short = dataclasses.replace(mlm.Config.tiny(), vocab_size=11, ff=24, sequence_length=8)
    shapes = dict(before)
    shapes[position] = before[position][:8]
    taken, notes = weights.params_for(folder, short, shapes)
    np.testing.assert_array_equal(taken[position], before[position][:8])
    assert not notes


def test_a_warm_start_requires_the_same_number_of_heads(folder: Path, tmp_path: Path) -> None:
    """No shape gives it: it comes from the config in the folder or the weights file."""
    theirs = weights.load(folder)
    weights.save(tmp_path / "x.safetensors", theirs.model, theirs.params)
    other = dataclasses.replace(theirs.model, heads=4)
    for source in (folder, tmp_path / "x.safetensors"):
        with pytest.raises(InputError, match=r"model.heads=2, .* has 4: set --model.heads 2"):
            weights.params_for(source, other, theirs.params)
        assert weights.params_for(source, theirs.model, theirs.params)[1] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_act": "relu"}, r"this network is not BERT: hidden_act='relu' \(here 'gelu'"),
        (
            {"attention_probs_dropout_prob": 1.3},
            r"attention_probs_dropout_prob=1.3: use a number of at least 0 and below 1",
        ),
    ],
)
def test_other_settings_are_refused_by_name(
    folder: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    other = changed(folder, tmp_path / "other", settings)
    with pytest.raises(InputError, match=message):
        weights.load(other)
    assert run("import", other, tmp_path / "out") == 2
    assert not (tmp_path / "out").exists()


def test_a_run_uses_the_tokenizer_of_its_initial_model(folder: Path, tmp_path: Path) -> None:
    """Training another tokenizer is refused: the embeddings would not match it."""
    data, log = text.Masked(batch_size=1, path=str(tmp_path)), list[str]()
    model = dataclasses.replace(mlm.Config.tiny(), init_from=str(folder))
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(f"{TEXT}.")
    model = dataclasses.replace(model, vocab_size=len(VOCABULARY))
    data = dataclasses.replace(data, cache_dir=str(tmp_path / "cache"))
    kept = data.open(model, seed=0, say=log.append).files_to_keep["tokenizer.json"]
    assert json.loads(kept) == json.loads((folder / "tokenizer.json").read_text())
    assert f"tokenizer of model.init_from: {folder}/tokenizer.json" in log
    file_only = dataclasses.replace(model, init_from=str(folder / "model.safetensors"))
    with pytest.raises(InputError, match=r"not a folder with a tokenizer.json: .*--data.tokenizer"):
        data.open(file_only, seed=0, say=log.append)


def test_another_padding_id_is_refused(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path / "other", {"pad_token_id": 3})
    message = r"has padding id 0, but model.pad_id is 3: .* or use the tokenizer that the model"
    with pytest.raises(InputError, match=message):
        fill_mask.MaskedModel(other)
    found = weights.load(other)
    with pytest.raises(InputError, match=message):
        huggingface.write(tmp_path / "out", found.model, found.params, tokenizer.of_source(other))
    null = changed(folder, tmp_path / "null", {"pad_token_id": None})
    assert fill_mask.MaskedModel(null).model.pad_id == 0


def test_an_export_replaces_an_older_one_completely(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(folder, out)
    huggingface.check_target(out)
    found, wordpiece = weights.load(folder), tokenizer.of_source(folder)

    def full(*_: object) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(tensor_files, "write", full)
        with pytest.raises(OSError, match="no room"):
            huggingface.write(out, found.model, found.params, wordpiece)
    assert not huggingface.is_model_folder(out)  # a mixture of both is not a model
    huggingface.write(out, found.model, found.params, wordpiece)
    index = out / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(InputError, match=r"has other files, such as model.safetensors.index.json"):
        huggingface.check_target(out)
    assert huggingface.tensors(out).keys() == huggingface.tensors(folder).keys()  # no index


def test_pseudo_perplexity_matches_its_definition(masked: fill_mask.MaskedModel) -> None:
    """Each token is masked by hand, in a text longer than the context window; for any --rows."""
    ids = masked.tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert len(ids) > 2 * masked.longest
    costs, right = [], 0
    for index, target in enumerate(ids):
        if target == 1:  # [UNK] is never a target
            continue
        start = min(max(index - 7, 0), len(ids) - 14)
        row = [2, *ids[start : start + 14], 3]
        row[1 + index - start] = 4
        chances = masked.log_chances(np.array([row], np.int32), np.array([1 + index - start]))[0]
        costs.append(-chances[target])
        right += int(chances.argmax() == target)
    progress: list[int] = []
    for rows in (1, 4):
        found = masked.score(
            [TEXT], rows=rows, max_tokens=None, each=lambda n, _: progress.append(n)
        )
        assert found.tokens == len(costs) == progress[-1]
        assert found.loss == pytest.approx(np.mean(costs), rel=1e-5)
        assert found.pseudo_perplexity == pytest.approx(np.exp(np.mean(costs)), rel=1e-5)
        assert found.accuracy == pytest.approx(right / len(costs))
    assert found.unknown == ids.count(1) == len(ids) - len(costs) == 3  # the commas
    assert found.lost == 3 / len(TEXT)
    first = masked.score([TEXT], rows=4, max_tokens=5, each=lambda *_: None)
    assert (first.tokens, first.loss) == (5, pytest.approx(np.mean(costs[:5]), rel=1e-5))
    short = masked.score(["paris is"], rows=4, max_tokens=None, each=lambda *_: None)
    assert short.tokens == 2  # padded
    literal = masked.score(["paris [MASK] is"], rows=4, max_tokens=None, each=lambda *_: None)
    assert (literal.tokens, literal.unknown) == (2, 3)  # parts of the text, not a mask
    with pytest.raises(InputError, match=r"all 2 tokens of the text are unknown"):
        masked.score(["?!"], rows=4, max_tokens=None, each=lambda *_: None)


def test_a_pseudo_log_likelihood_is_a_sum_over_masked_tokens(
    masked: fill_mask.MaskedModel,
) -> None:
    """Of all tokens, unknown ones included, for texts of different lengths."""
    texts = ("paris is, the capital", "paris", "the capital of paris is the capital", "?!")
    wanted = []
    for given in texts:
        ids = masked.tokenizer.encode(given, add_special_tokens=False).ids
        total = 0.0
        for index, target in enumerate(ids):
            row = np.array([[2, *ids, 3]], np.int32)
            row[0, 1 + index] = 4
            total += masked.log_chances(row, np.array([1 + index], np.int32))[0, target]
        wanted.append(total)
    np.testing.assert_allclose(masked.log_probabilities(texts, 4), wanted, atol=1e-4)
    with pytest.raises(InputError, match=r"tokens, but the context window has 14: use a model"):
        masked.log_probabilities([TEXT], 4)


def test_probabilities_are_those_of_the_model(masked: fill_mask.MaskedModel) -> None:
    first, second = masked.fill("paris [MASK] the <mask>.", top=11)
    assert sum(one.probability for one in first) == pytest.approx(1)
    assert [one.probability for one in first] == sorted(
        (one.probability for one in first), reverse=True
    )
    row = np.zeros((1, 16), np.int32)
    row[0, :7] = [2, 5, 4, 7, 4, 1, 3]
    logits = masked.log_chances(row, np.array([4]))[0]
    assert second[0].token == VOCABULARY[int(logits.argmax())]
    assert second[0].probability == pytest.approx(float(jnp.exp(logits.max())))


def test_commands(
    any_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], masked: Any
) -> None:
    folder = any_folder
    assert run("fill", folder, "Paris is the [MASK] of France.", "--top", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    best = masked.fill("Paris is the [MASK] of France.", 2)[0][0]
    assert len(lines) == 2
    assert lines[0].split() == [f"{best.probability:.4f}", best.token]
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    numbers = tmp_path / "out.json"
    assert run("evaluate", folder, "--data", file, "--max-tokens", 9, "--json", numbers) == 0
    out = capsys.readouterr().out
    assert "8 tokens of the first 9 (--max-tokens), one masked at a time" in out
    lost = f"{100 * 3 / len(TEXT):.2f}%"
    assert f"excludes 1 unknown tokens; the tokenizer loses {lost} of the characters" in out
    content = json.loads(numbers.read_text())
    assert f"pseudo-perplexity  {content['pseudo_perplexity']:.4f}" in out
    assert (content["tokens"], content["unknown"]) == (8, 1)
    assert run("evaluate", "--data", file, "--max-tokens", 9, folder) == 0  # in any order
    assert capsys.readouterr().out in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fill", "FOLDER", "no mask here"], "has no [MASK]: put [MASK] where"),
        (
            ["fill", "FOLDER", "[MASK] " * 20],
            "has 20 tokens, but the model takes at most 14: shorten it",
        ),
        (["fill", "FOLDER", "[MASK]", "--top", "0"], "top 0: use a number from 1 to 11"),
        (["evaluate", "FOLDER", "--data", "FOLDER"], "is a folder: pass a text file"),
        (["evaluate", "FOLDER", "--data", "EMPTY"], "the text has no tokens"),
        (["fill", "FILE", "[MASK]"], "is a weights file, which has no tokenizer: pass the"),
        (["export", "FILE", "out", "--format", "hf"], "has no model config: convert it with"),
        (
            ["export", "FOLDER", "FULL", "--format", "hf"],
            "has other files, such as empty.txt: choose a new folder",
        ),
        (["import", "FOLDER", "FOLDER"], "is the same folder as IN: choose another one"),
    ],
)
def test_wrong_use_is_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "empty.txt").write_text("  \n")
    places = {"FOLDER": folder, "EMPTY": tmp_path / "empty.txt", "FULL": tmp_path}
    places["FILE"] = folder / "model.safetensors"
    assert run(*(places.get(one, one) for one in arguments)) == 2
    found = capsys.readouterr().err
    assert message in found
    assert found.count("\n") == 1
