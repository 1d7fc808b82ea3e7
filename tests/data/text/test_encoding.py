"""Documents as token ids, by sentence or without any loss."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxtrain.data.text import byte_level, documents, encoding, specials, tokens
from jaxtrain.data.text.splitting import SPLITS, TRAIN, VAL, by_document
from jaxtrain.errors import InputError

TEXTS = [
    "  Two  spaces.\n\n\nLines,\r\n and a tab\t at the end \n",
    "A literal <|bos|> and [SEP] are text.",
    "中文字。 größer e\u0301 🙂\x00\x07",
    "\n",  # blank: no document
    "one",
    " two three. Four! ",
    "Five? six",
    "seven " * 40,
]


def corpus(folder: Path) -> tokens.Corpus:
    folder.mkdir(exist_ok=True)
    path = folder / "in.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    files = documents.scan(str(path), None, folder, "--data.path", lambda line: None)
    counts = [file.documents for file in files]
    split = by_document(counts, "in.jsonl", train_split=0.6, max_examples=None)
    return tokens.Corpus(files=files, split=split, text_field=None)


def words(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    byte_level.train(TEXTS, 280).save(str(path))
    return path


def prepare(what: tokens.Corpus, path: Path, folder: Path) -> tuple[Path, dict]:
    folder.mkdir(exist_ok=True)
    return tokens.prepare(
        what, tokenizer_path=path, form="exact", folder=folder, say=lambda line: None, processes=1
    )


def test_an_exact_stream_has_every_byte_of_every_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, path = corpus(tmp_path), words(tmp_path)
    folder, manifest = prepare(what, path, tmp_path / "one")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    assert manifest["specials"] == {"before": [0]}
    for side, name in ((TRAIN, "train"), (VAL, "val")):
        mine = [document for _, its_side, document in what.read() if its_side == side]
        stream = np.fromfile(folder / f"{name}.tokens", manifest["dtype"])
        ends = np.fromfile(folder / f"{name}.ends", np.uint64).tolist()
        starts = [0, *ends[:-1]]
        assert np.flatnonzero(stream == 0).tolist() == starts
        parts = [stream[start + 1 : end].tolist() for start, end in zip(starts, ends, strict=True)]
        assert [tokenizer.decode(part, skip_special_tokens=False) for part in parts] == mine
        facts = manifest["splits"][name]
        assert (facts["documents"], facts["tokens"]) == (len(mine), len(stream))
        assert facts["bytes"] == sum(len(document.encode()) for document in mine) > 0
    lengths = np.fromfile(folder / tokens.TOKEN_BYTES, np.int32)
    assert (lengths == byte_level.lengths(tokenizer)).all()

    monkeypatch.setattr(tokens, "_PIECE_CHARACTERS", 10)
    again, _ = prepare(what, path, tmp_path / "two")
    for name in SPLITS:
        assert (again / f"{name}.tokens").read_bytes() == (folder / f"{name}.tokens").read_bytes()


def test_each_form_has_its_own_cache(tmp_path: Path) -> None:
    """Even if one tokenizer has the special tokens of both forms."""
    both = byte_level.train(TEXTS, 280)
    both.add_special_tokens(list(specials.NAMES))
    path = tmp_path / "tokenizer.json"
    both.save(str(path))
    exact, _ = prepare(corpus(tmp_path), path, tmp_path / "cache")
    other, manifest = tokens.prepare(
        corpus(tmp_path), tokenizer_path=path, folder=tmp_path / "cache", say=lambda line: None
    )
    assert exact != other
    assert specials.Specials.from_json(manifest["specials"]).sep == 283
    assert not (other / tokens.TOKEN_BYTES).exists()


def test_a_lossy_tokenizer_that_passes_the_check_is_caught(tmp_path: Path) -> None:
    """The check's probe text does not include the one word that this one shortens."""
    lossy = byte_level.train(TEXTS, 280)
    lossy.normalizer = tokenizers.normalizers.Replace("größer", "gr")
    path = tmp_path / "tokenizer.json"
    byte_level.check(lossy, "it")
    lossy.save(str(path))
    with pytest.raises(InputError, match=r"loses text: .* has \d+ bytes, but its tokens stand for"):
        prepare(corpus(tmp_path), path, tmp_path / "cache")


def test_documents_are_split_into_sentences() -> None:
    text = (
        'Mr. Bennet met Dr. J. Doe at 3.15 p.m. in town! "Why?" he said. He left...\n'
        "A line\nthat goes on\n \n= A title =\n\nThe end. (Really.) 「終わり。」はい。"
    )
    assert encoding.sentences(text) == [
        "Mr. Bennet met Dr. J. Doe at 3.15 p.m. in town!",
        '"Why?" he said.',
        "He left...",
        "A line\nthat goes on",
        "= A title =",
        "The end.",
        "(Really.)",
        "「終わり。」",
        "はい。",
    ]
    assert encoding.sentences(" \n") == []
