"""``generate`` and ``evaluate`` of causal models, compared with the model without a cache."""

import dataclasses
import json
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.small_params import random_params, write_run
from program import train

import jaxtrain
from jaxtrain import config, main
from jaxtrain.cli import text as text_commands
from jaxtrain.data.text import byte_level
from jaxtrain.errors import InputError
from jaxtrain.inference import language_model
from jaxtrain.models import gpt, mlm
from jaxtrain.ops import generation
from jaxtrain.ops.sampling import Choice
from jaxtrain.training import state

LENGTH, VOCABULARY = 24, 290
MODEL = dataclasses.replace(gpt.Config.tiny(), sequence_length=LENGTH, vocab_size=VOCABULARY)
DRAWN = Choice(temperature=0.9, top_k=40, top_p=0.95)


def run(*arguments: Any) -> int:
    return main.main([*map(str, arguments)])


def saved(
    folder: Path,
    model: Any,
    files: dict[str, bytes],
    data: dict[str, str] | None = None,
    **meta: Any,
) -> Path:
    """Writes a run directory with a checkpoint of random parameters."""
    params = random_params(model, 0.4)
    if "lm_head.words" in params:  # special tokens are never among the most likely
        params["lm_head.words"][:9] = 0
    described = {"seed": 0, "model": config.to_dict(model), "data": data or {}}
    return write_run(folder, model, 3, params, files=files, **{"config": described} | meta)


@pytest.fixture(scope="module")
def tokenizer_files() -> dict[str, bytes]:
    """A tokenizer with fewer ids than the model."""
    trained = byte_level.train(
        ["once upon a time there was a time", "größer, größer 🙂"] * 4, VOCABULARY - 10
    )
    return {"tokenizer.json": trained.to_str().encode()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: dict[str, bytes]) -> Path:
    return saved(tmp_path_factory.mktemp("run") / "gpt", MODEL, tokenizer_files)


@pytest.fixture(scope="module")
def model(source: Path) -> language_model.CausalModel:
    return language_model.CausalModel(source)


def by_hand(
    model: language_model.CausalModel, prompt: list[int], tokens: int, choice: Choice, seed: int
) -> list[int]:
    """Generates one text without a cache: computes the entire window for each token."""
    definition = state.ModelDefinition(MODEL.build)
    keys, window, found = generation.keys_of_rows(seed, 1), list(prompt), list[int]()
    known = len(model.bytes_of)

    def next_of(arrays: Any, ids: jax.Array, last: int, number: int) -> jax.Array:
        logits = definition.module(arrays, {}).logits(ids)[:, last].at[:, known:].set(-jnp.inf)
        return generation.choose(choice, logits, keys, number)[0]

    compiled = jax.jit(next_of)
    for number in range(tokens):
        if len(window) > LENGTH:
            window = window[-(LENGTH // 2) :]
        filled = np.array([window + [0] * (LENGTH - len(window))], np.int32)
        found.append(int(compiled(model._arrays, filled, len(window) - 1, number)))
        window.append(found[-1])
    return found


@pytest.mark.parametrize("choice", [Choice(temperature=0.0), DRAWN], ids=str)
def test_the_cache_does_not_change_the_tokens(
    model: language_model.CausalModel, choice: Choice
) -> None:
    """Also far beyond the context window; that it is full is reported once."""
    notes: list[str] = []
    prompt = model.encode("once upon")
    ids = model.ids(prompt, tokens=60, choice=choice, seed=7, say=notes.append)
    assert [int(one[0]) for one in ids] == by_hand(model, prompt, 60, choice, 7)
    assert notes == [
        "the context window of 24 tokens is full: from here on the model sees only the last 12 to "
        "24 tokens"
    ]


def test_a_text_does_not_depend_on_the_others(model: language_model.CausalModel) -> None:
    prompt = model.encode("a")

    def written(**how: Any) -> np.ndarray:
        return np.stack(list(model.ids(prompt, tokens=40, choice=DRAWN, **how)))

    one, three, again = written(), written(samples=3), written(samples=3)
    np.testing.assert_array_equal(one[:, 0], three[:, 0])
    np.testing.assert_array_equal(again, three)
    assert len({tuple(text) for text in three.T}) == 3
    assert (written(seed=1) != one).any()
    assert one.max() < len(model.bytes_of) < VOCABULARY  # ids without a token are never sampled


@pytest.mark.parametrize(("room", "tokens"), [(1, 3), (LENGTH - 1, 1), (LENGTH, 3)])
def test_prompts_up_to_the_context_window(
    model: language_model.CausalModel, room: int, tokens: int
) -> None:
    prompt = [model.begin, *model.encode("a")[1:] * (room - 1)]
    ids = [int(one[0]) for one in model.ids(prompt, tokens=tokens, choice=DRAWN)]
    assert ids == by_hand(model, prompt, tokens, DRAWN, 0)


def written(model: language_model.CausalModel, *rows: list[int]) -> list[str]:
    """Returns the text that each token adds; that of several texts is joined by ``|``."""
    ids = iter([np.array(one, np.int32) for one in zip(*rows, strict=True)])
    return ["|".join(grown) for grown in model.texts(ids)]


def test_characters_are_never_split(model: language_model.CausalModel) -> None:
    byte = {one: i for i, one in reversed([*enumerate(model.bytes_of)])}

    def spelled(content: bytes) -> list[int]:
        return [byte[content[i : i + 1]] for i in range(len(content))]

    assert written(model, spelled("aé🙂\n".encode())) == ["a", "", "é", "", "", "", "🙂", "\n"]
    assert written(model, spelled(b"\xf0\x9fa")) == ["", "", "\ufffda"]  # an incomplete character
    assert written(model, spelled(b"a\xf0")) == ["a", "", "\ufffd"]  # cut off by the end
    assert written(model, [*spelled(b"a\xf0"), model.begin]) == ["a", "", "\ufffd"]
    ids = model.tokenizer.encode("größer, once", add_special_tokens=False).ids
    assert "".join(written(model, ids)) == "größer, once"


def test_a_literal_special_token_is_text(model: language_model.CausalModel) -> None:
    assert model.encode("<|bos|>")[0] == model.begin
    assert model.begin not in model.encode("<|bos|>")[1:]


FLAGS = ("--tokens", 50, "--temperature", 0.9, "--top-k", 40, "--top-p", 0.95)


def expected(model: language_model.CausalModel, prompt: str, row: int = 0, samples: int = 1) -> str:
    ids = model.ids(model.encode(prompt), tokens=50, choice=DRAWN, samples=samples)
    return prompt + "".join(grown[row] for grown in model.texts(ids))


def test_the_command_prints_only_the_text(
    source: Path, model: language_model.CausalModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", source / "checkpoints" / "3", "once", *FLAGS) == 0
    found = capsys.readouterr()
    assert found.out == expected(model, "once") + "\n"
    assert re.fullmatch(r"\nnote: the context window of 24 tokens is full: .*\n", found.err)
    assert run("generate", source, "once", *FLAGS, "--samples", 2) == 0
    first, second = (expected(model, "once", row, 2) for row in range(2))
    assert capsys.readouterr().out == (
        f"--- completion 1 of 2 ---\n{first}\n--- completion 2 of 2 ---\n{second}\n"
    )


def test_a_terminal_gets_no_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts() -> Iterator[list[str]]:
        yield from ([one] for one in ("\x1b[2J", "\ta\n", "\x9b"))

    text_commands._print("on", texts(), 1)
    assert capsys.readouterr().out == "on\x1b[2J\ta\n\x9b\n"
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True)
    text_commands._print("on", texts(), 1)
    assert capsys.readouterr().out == "\x1b[1mon\x1b[0m\\x1b[2J\ta\n\\x9b\n"


def test_the_default_source_is_the_latest_run(
    source: Path,
    model: language_model.CausalModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("generate", "once") == 2
    assert "no run in output has a causal language model" in capsys.readouterr().err
    (tmp_path / "output").mkdir()
    (tmp_path / "output/latest").write_text(f"{source}\n")
    assert run("generate", "once", *FLAGS) == 0
    assert capsys.readouterr().out == expected(model, "once") + "\n"
    assert run("generate", "output/latest") == 2
    assert "missing TEXT: give a prompt, such as output/latest" in capsys.readouterr().err
    for text in ("output", "~nobody went"):  # texts, not names of models
        assert run("generate", text, "--tokens", 2) == 0
    assert run("generate", "x" * 2000) == 2
    assert "tokens with the one that begins it" in capsys.readouterr().err
    (tmp_path / "output/latest").unlink()
    shutil.copytree(source, tmp_path / "output/demo_gpt/a")
    (tmp_path / "output/demo_mlm").mkdir()
    saved(tmp_path / "output/demo_mlm/b", mlm.Config.tiny(), {})
    (tmp_path / "output/latest").write_text("demo_mlm/b\n")
    assert run("generate", "once", *FLAGS) == 0
    assert capsys.readouterr().out == expected(model, "once") + "\n"


OWN_MODEL = """
import dataclasses
from jaxtrain.models import gpt

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(gpt.Config):
    pass
"""
OWN_CONFIG = """
import dataclasses, own_lm
from jaxtrain import config

base = config.named("demo_gpt")
run = dataclasses.replace(base, model=own_lm.Config.tiny())
"""


def test_a_model_outside_the_package_needs_its_config(
    tokenizer_files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The file that the run names is shown, and never imported."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    described = config.to_dict(MODEL) | {"class": "own_lm.Config"}
    trap = tmp_path / "own_lm.py"
    trap.write_text("raise SystemExit('imported')")
    whole = {"seed": 0, "model": described, "data": {}}
    run_of = saved(tmp_path / "run", MODEL, tokenizer_files, config=whole, model_file=str(trap))
    (tmp_path / "text.txt").write_text("once upon a time")
    out = tmp_path / "out"
    commands: list[tuple[Any, ...]] = [
        ("generate", run_of, "once", *FLAGS),
        ("export", run_of, out, "--format", "hf"),
        ("evaluate", run_of, "--data", tmp_path / "text.txt"),
    ]
    for arguments in commands:
        assert run(*arguments) == 2
        assert capsys.readouterr().err == (
            f"error: {run_of}/checkpoints/3.json: its model 'own_lm.Config' is not part of "
            f"jaxtrain (it was defined in '{trap}'): pass the config that it was trained with, "
            "--config FILE.py\n"
        )
    with pytest.raises(InputError, match=r"that it was trained with, config FILE\.py$"):
        jaxtrain.load_model(run_of)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "own_lm.py").write_text(OWN_MODEL)
    own = mine / "own_run.py"
    own.write_text(OWN_CONFIG)
    for arguments in commands:
        assert run(*arguments, "--config", own) == 0
    assert capsys.readouterr().out.startswith("once")
    assert (out / "model.safetensors").exists()
    assert jaxtrain.load_model(run_of, config=own).generate("once", tokens=2).startswith("once")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", ""], "the prompt is empty: pass at least"),
        (["RUN", "a\udcff"], "the text is not UTF-8"),
        (
            ["RUN", "a", "--temperature", "-0.5"],
            "temperature -0.5: use 0 (always the most likely token)",
        ),
        (["RUN", "a", "--top-k", "291"], "top_k 291: use a number from 1 to 290"),
        (["RUN", "a", "--top-p", "1.2"], "top_p 1.2: use a probability above 0"),
        (
            ["MASKED", "a"],
            "has the model mlm, which generate cannot use: pass a model of the kind gpt or "
            "llama; to use this model: ",
        ),
        (["BARE", "a"], "no tokenizer.json found in"),
        ([__file__, "a"], "is a weights file, which has no tokenizer"),
    ],
)
def test_wrong_use_is_one_line(
    source: Path,
    tokenizer_files: dict[str, bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    places = {"RUN": source}
    if arguments[0] == "MASKED":
        places["MASKED"] = saved(tmp_path / "masked", mlm.Config.tiny(), tokenizer_files)
    if arguments[0] == "BARE":
        places["BARE"] = saved(tmp_path / "bare", MODEL, {})
    assert run("generate", *(places.get(one, one) for one in arguments)) == 2
    found = capsys.readouterr()
    assert message in found.err
    assert found.err.count("\n") == 1
    assert not found.out


def costs_by_hand(model: language_model.CausalModel, ids: list[int]) -> list[float]:
    """Returns the cost of each token in nats, each computed from its own window."""
    definition = state.ModelDefinition(MODEL.build)
    logits_of = jax.jit(lambda arrays, row: definition.module(arrays, {}).logits(row))
    given, costs, half = [model.begin, *ids], [], LENGTH // 2
    for index, target in enumerate(ids):
        start = max(0, -(-(index + 1 - LENGTH) // half) * half)  # of the first window with it
        window = np.full((1, LENGTH), 7, np.int32)
        seen = given[start : index + 1]
        window[0, : len(seen)] = seen
        logits_V = logits_of(model._arrays, window)[0, len(seen) - 1]
        costs.append(-float(jax.nn.log_softmax(logits_V)[target]))
    return costs


@pytest.mark.parametrize("times", [1, 9])  # shorter than a window; several windows
def test_evaluate_scores_each_token_once(
    source: Path,
    model: language_model.CausalModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    times: int,
) -> None:
    text, numbers = "once upon a time, größer 🙂. " * times, tmp_path / "out.json"
    (tmp_path / "text.txt").write_text(text)
    given = ("--data", tmp_path / "text.txt", "--rows", 2)
    assert run("evaluate", source, *given, "--json", numbers) == 0
    out, content = capsys.readouterr().out, json.loads(numbers.read_text())
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    costs = costs_by_hand(model, ids)
    assert (content["tokens"], content["bytes"]) == (len(ids), len(text.encode()))
    assert content["loss"] == pytest.approx(np.mean(costs), rel=1e-5)
    assert content["perplexity"] == pytest.approx(np.exp(np.mean(costs)), rel=1e-5)
    bits = sum(costs) / np.log(2) / len(text.encode())
    assert content["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert f"bits per byte         {bits:.4f}" in out
    assert run("evaluate", source, *given, "--max-tokens", 5, "--json", numbers) == 0
    first = json.loads(numbers.read_text())
    assert first["loss"] == pytest.approx(np.mean(costs[:5]), rel=1e-5)


def test_evaluate_warns_of_text_that_the_run_was_trained_on(
    tmp_path: Path, tokenizer_files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("books/train.txt", "other.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("once upon a time")
    source = saved(tmp_path / "run", MODEL, tokenizer_files, {"path": str(tmp_path / "books")})
    for name, warns in (("books/train.txt", True), ("other.txt", False)):
        assert run("evaluate", source, "--data", tmp_path / name) == 0
        assert ("the result may be that of text it has seen" in capsys.readouterr().err) == warns


def test_predict_is_the_loss_of_each_end(model: language_model.CausalModel) -> None:
    """For sequences of different lengths, in batches, up to the context window."""
    rng = np.random.default_rng(0)
    ends = [
        language_model.Continuation(
            np.array([model.begin, *rng.integers(0, 200, length - 1)], np.int32), start
        )
        for length, start in ((5, 1), (LENGTH, 20), (2, 1), (9, 8), (17, 3))
    ]
    best = list(model.ids(ends[0].tokens[:1].tolist(), tokens=2, choice=Choice(temperature=0.0)))
    likely = [model.begin, *(int(one[0]) for one in best)]
    ends += [
        language_model.Continuation(np.array(likely, np.int32), 1),
        language_model.Continuation(np.array([*likely, 99], np.int32), 1),
        language_model.Continuation(np.array([99, *likely], np.int32), 3),
    ]
    losses, most_likely = model.predict(ends, rows=3)
    costs = [costs_by_hand(model, one.tokens[1:].tolist())[one.start - 1 :] for one in ends[:5]]
    np.testing.assert_allclose(losses[:5], [np.mean(each) for each in costs], rtol=1e-5)
    assert most_likely[5:7].tolist() == [True, False]


def test_blimp_sums_the_costs_of_each_sentence(
    source: Path,
    model: language_model.CausalModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All tokens of a sentence after the begin token, in batches of different lengths."""
    good, bad = "once upon a time.", "once upon a"
    texts = (good, bad, "x", "größer 🙂. ")
    found = model.log_probabilities(texts, 3)
    for text, value in zip(texts, found, strict=True):
        ids = model.tokenizer.encode(text, add_special_tokens=False).ids
        assert value == pytest.approx(-sum(costs_by_hand(model, ids)), abs=1e-4)
    with pytest.raises(InputError, match=f"tokens, but the context window has {LENGTH}: use"):
        model.log_probabilities(["x" * (LENGTH + 1)], 3)

    (tmp_path / "blimp").mkdir()
    pair = json.dumps({"sentence_good": good, "sentence_bad": bad, "field": "syntax"})
    (tmp_path / "blimp/drop.jsonl").write_text(f"{pair}\n{pair}\n")
    asked = ("evaluate", source, "--data", tmp_path / "blimp")
    assert run(*asked, "--json", tmp_path / "out.json", "--max-examples", 1) == 0
    out, content = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    right = float(found[0] > found[1])
    assert (content["accuracy"], content["max_examples"]) == (right, 1)
    assert re.search(rf"^mean +1 +1 +{right:.4f} +0\.612 +0\.698 +0\.696 +0\.830$", out, re.M)
    loaded = jaxtrain.load_model(source)
    assert loaded.evaluate(tmp_path / "blimp").accuracy == right
    with pytest.raises(InputError, match=r"^max_tokens 5: data .*blimp has the pairs of BLiMP"):
        loaded.evaluate(tmp_path / "blimp", max_tokens=5)
    assert run(*asked, "--max-tokens", 5) == 2
    assert "blimp has the pairs of BLiMP; omit the flag" in capsys.readouterr().err


CORE = {
    "core.yaml": """
icl_tasks:
- {label: says, icl_task_type: multiple_choice, dataset_uri: says.jsonl, num_fewshot: [1]}
- {label: who, icl_task_type: schema, dataset_uri: who.jsonl, num_fewshot: [0]}
- {label: next, icl_task_type: language_modeling, dataset_uri: next.jsonl, num_fewshot: [0]}
""",
    "eval_meta_data.csv": "Eval Task,Random baseline\nsays,50\nwho,50\nnext,0\n",
    "eval_data/says.jsonl": """
{"query": "The dog says", "choices": ["woof", "meow"], "gold": 0}
{"query": "The cat says", "choices": ["woof", "meow"], "gold": 1}
""",
    "eval_data/who.jsonl": """
{"context_options": ["The dog", "The cat"], "continuation": "says woof", "gold": 0}
{"context_options": ["The dog", "The cat"], "continuation": "says meow", "gold": 0}
""",
    "eval_data/next.jsonl": """
{"context": "The dog ", "continuation": "says woof"}
{"context": "The cat", "continuation": "says woof"}
""",
}
"""Two right answers, one of the two, and one of the two: CORE is (1 + 0 + 0.5) / 3."""


@pytest.mark.long  # test_core_tasks.py scores the tasks
def test_core_of_a_trained_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    said = [draw.choice(("The dog says woof", "The cat says meow")) for _ in range(3000)]
    (tmp_path / "text.txt").write_text("\n\n".join(said))
    train(
        tmp_path,
        *("train", "demo_gpt", "--data.path", "text.txt", "--output-dir", "run"),
        *("--model.depth", 1, "--model.width", 32, "--model.heads", 2, "--model.vocab_size", 300),
        *("--model.sequence_length", 64, "--data.workers", 0, "--loop.steps", 150),
        *("--loop.eval_every", None, "--checkpoint.best_metric", None),
    )
    folder = tmp_path / "eval_bundle"
    for name, content in CORE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    asked = ("evaluate", tmp_path / "run", "--data", folder)
    assert run(*asked, "--json", tmp_path / "core.json") == 0
    out = capsys.readouterr().out
    assert re.search(r"^task +kind +shots +examples +accuracy +baseline +centered$", out, re.M)
    assert re.search(r"^who +schema +0 +2 +0\.5000 +0\.5000 +0\.0000$", out, re.M)
    assert re.search(r"^CORE +0\.5000$", out, re.M)
    content = json.loads((tmp_path / "core.json").read_text())
    assert content["core"] == pytest.approx(0.5)
    assert [one["accuracy"] for one in content["tasks"]] == [1, 0.5, 0.5]
    assert (content["source"], content["cut"]) == (str(tmp_path / "run/checkpoints/150.json"), 0)
    assert jaxtrain.load_model(tmp_path / "run").evaluate(folder).core == content["core"]
    assert run(*asked, "--max-examples", 1) == 2
    assert "1 examples to measure, but task says requires at least 2" in capsys.readouterr().err
    assert run(*asked, "--max-tokens", 5) == 2
    assert f"--max-tokens 5: --data {folder} has the tasks of CORE; omit" in capsys.readouterr().err
    (folder / "core.yaml").unlink()
    assert run(*asked) == 2
    assert "is a folder: pass a text file, or a folder with core.yaml" in capsys.readouterr().err
    text = ("evaluate", tmp_path / "run", "--data", tmp_path / "text.txt", "--max-examples", 1)
    assert run(*text) == 2
    assert "text.txt is not a folder with the tasks of CORE" in capsys.readouterr().err
