"""Text for causal language models: from files to windows, without losing a byte."""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from data.text import small_text
from data.text.small_text import Model, documents_in, silent, token_ids, words_of

from jaxtrain import main
from jaxtrain.data.source import Source, Sources
from jaxtrain.data.text import Causal, byte_level
from jaxtrain.errors import InputError

MODEL = Model(vocab_size=300)
TEXTS = [
    "  Two  spaces,\n\n\nlines,\r\n\ta tab and <|bos|> at the end \n",
    "中文字。 größer 🙂🙂 größer",
    "one two one two " * 9,
    "Ünïcode\u0301 \u00a0",
    "five",
    "six\n",
]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    return path


def opened(path: Path, cache: Path, model: Model = MODEL, **fields: object) -> Sources:
    config = Causal(path=str(path), batch_size=2, cache_dir=str(cache), **fields)  # type: ignore[arg-type]
    return config.open(model, seed=0, say=silent)


def examples(source: Source) -> list[dict[str, np.ndarray]]:
    return [source.example(index, np.random.default_rng(0)) for index in range(len(source))]


def test_documents_can_be_rebuilt_from_windows(documents: Path, tmp_path: Path) -> None:
    got = opened(documents, tmp_path)
    decode = functools.partial(words_of(got).decode, skip_special_tokens=False)
    found = [
        text for source in (got.train, got.val) for text in documents_in(token_ids(source), decode)
    ]
    assert sorted(found) == sorted(TEXTS)
    assert "bytes per token (measured)" in got.summary


def bytes_only(path: Path) -> Path:
    """A tokenizer with one token per byte, so most are parts of a character; bos comes last."""
    words = tokenizers.Tokenizer(
        tokenizers.models.BPE({one: i for i, one in enumerate(byte_level.CHARACTERS)}, [])
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    words.add_special_tokens(["<|endoftext|>"])
    words.save(str(path))
    return path


def test_byte_counts_do_not_depend_on_the_tokenizer(documents: Path, tmp_path: Path) -> None:
    """So bits per byte are comparable between models with different tokenizers."""
    alone = bytes_only(tmp_path / "tokenizer.json")
    # A trained one whose tokens are parts of characters, single characters, and several.
    trained = byte_level.train(TEXTS, 290)
    split = [one for one in trained.get_vocab() if len(one) in (2, 3) and one[0] in "äåæð"]
    assert split
    trained.save(str(tmp_path / "trained.json"))
    lengths = []
    for given in (alone, tmp_path / "trained.json"):
        got = opened(documents, tmp_path, tokenizer=str(given))
        total = sum(
            int(example["target_bytes"].sum())
            for source in (got.train, got.val)
            for example in examples(source)
        )
        # The first token of each split is not a target; it is a <|bos|>, with no bytes.
        assert total == sum(len(text.encode()) for text in TEXTS)
        lengths.append(len(token_ids(got.train)))
    assert lengths[0] > 1.2 * lengths[1]


def test_the_fingerprint_changes_with_the_windows(folder: Path, cache: Path) -> None:
    prints = set()
    for length, fit in itertools.product((32, 40), (False, True)):
        model = dataclasses.replace(MODEL, sequence_length=length)
        one = opened(folder, cache, model, fit_documents=fit)
        prints |= {one.train.fingerprint, one.val.fingerprint}
    assert len(prints) == 8


def test_lossy_tokenizers_are_rejected(folder: Path, tmp_path: Path) -> None:
    masked = small_text.opened(folder, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(masked.files_to_keep["tokenizer.json"])
    with pytest.raises(InputError, match=r"a WordPiece tokenizer that has no token for"):
        opened(folder, tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))


CONFIG = """
import dataclasses
from jaxtrain import config
from jaxtrain.data import text
from jaxtrain.models import mlm
base = config.named("demo_mlm")
run = dataclasses.replace(
    base,
    model=dataclasses.replace(mlm.Config.tiny(), vocab_size=300),
    data=text.Causal(batch_size=2),
)
"""


def test_prepare_tokens_builds_the_cache_of_a_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the model's sequence length and vocabulary size matter."""
    (tmp_path / "tiny.py").write_text(CONFIG)
    named = ["--config", str(tmp_path / "tiny.py"), "--data.path", str(folder)]
    cache = tmp_path / "cache"
    named += ["--data.cache_dir", str(cache), "--json", str(tmp_path / "out.json")]
    assert main.main(["prepare", "tokens", *named]) == 0
    out = capsys.readouterr().out
    assert "sequences of 16" in out
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["summary"] in out
    said: list[str] = []
    config = Causal(path=str(folder), batch_size=2, cache_dir=str(cache))
    got = config.open(dataclasses.replace(MODEL, sequence_length=16), seed=0, say=said.append)
    assert all("validate" in line for line in said)  # nothing is made
    wanted = {"examples": len(got.train), "fingerprint": got.train.fingerprint}
    assert content["train"] == wanted
