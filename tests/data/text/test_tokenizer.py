import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import tokenizers
from checkpoint import small_checkpoint

from jaxtrain.data.text import specials, tokenizer
from jaxtrain.data.text.specials import NAMES as SPECIALS
from jaxtrain.errors import InputError

TEXT = Path(tokenizer.__file__).read_text()
KINDS = get_args(tokenizer.Kind)


def test_the_vocabulary_has_the_requested_size() -> None:
    for size in (100, 257, 400):
        vocab = tokenizer.train([TEXT], size).get_vocab()
        assert sorted(vocab.values()) == list(range(size))  # dense, without duplicates
        assert tuple(sorted(vocab, key=lambda entry: vocab[entry])[:5]) == SPECIALS


def test_a_small_text_gives_a_smaller_vocabulary() -> None:
    vocab = tokenizer.train(["ab ab ab ba. ba."], 1000).get_vocab()
    assert set(vocab) == {*SPECIALS, ".", "a", "b", "##a", "##b", "ab", "ba"}
    assert sorted(vocab.values()) == list(range(12))


def test_unknown_and_rare_characters_become_unk() -> None:
    words = tokenizer.train([TEXT + " ☃"], 300)  # occurs once: excluded
    assert words.encode("☃ ж tokenizer").tokens[:3] == ["[CLS]", "[UNK]", "[UNK]"]
    assert words.token_to_id("☃") is None


def test_wordpiece_encodes_like_bert() -> None:
    words = tokenizer.train([TEXT], 300)
    assert words.encode("TOKENIZER").ids == words.encode("tokenizer").ids
    assert words.encode("a", "b").tokens == ["[CLS]", "a", "[SEP]", "b", "[SEP]"]
    assert words.encode("a", "b").type_ids == [0, 0, 0, 1, 1]
    assert words.encode("x [MASK]").ids[-2] == 4
    text = "the vocabulary of a tokenizer"
    assert words.decode(words.encode(text).ids) == text


@pytest.mark.parametrize(
    "text",
    [
        "हिन्दी में स्वर चिह्न महत्वपूर्ण हैं",
        "ภาษาไทยมีวรรณยุกต์ที่สำคัญ",
        "tiếng việt ma má mà mả mã mạ",
        "le garçon a mangé où tu étais",
        "ひらがな が パーティー ぴ",
        "בְּרֵאשִׁית",
        "한국어 텍스트",
    ],
)
def test_wordpiece_keeps_accents_and_vowel_signs(text: str) -> None:
    words = tokenizer.train([f"{text} " * 3], 300)
    assert words.decode(words.encode(text).ids) == text
    for form in ("NFC", "NFD"):  # as macOS writes names of files
        other = unicodedata.normalize(form, text.upper())
        assert words.encode(other).ids == words.encode(text).ids


def test_training_is_the_same_in_every_process() -> None:
    program = (
        "import sys; from jaxtrain.data.text import tokenizer; text = sys.stdin.read();"
        f"print(*(tokenizer.train([text], 300, kind).to_str() for kind in {KINDS}), end='')"
    )
    there = subprocess.run(
        [sys.executable, "-c", program],
        input=TEXT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert there.stdout == " ".join(tokenizer.train([TEXT], 300, kind).to_str() for kind in KINDS)


def test_load_checks_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    words = tokenizer.train([TEXT], 300)
    words.enable_padding(length=50)
    words.enable_truncation(10)
    words.save(str(path))
    assert len(tokenizer.load(path, 300, lossless=False).encode("a " * 30).ids) == 32
    with pytest.raises(
        InputError, match=r"300 ids, but model.vocab_size is 299: set --model.vocab_size 300"
    ):
        tokenizer.load(path, 299, lossless=False)
    with pytest.raises(InputError, match="no such file"):
        tokenizer.load(tmp_path / "gone.json", 300, lossless=False)
    path.write_text(json.dumps({"a": 1}))
    with pytest.raises(InputError, match=r"not a tokenizer.json"):
        tokenizer.load(path, 300, lossless=False)


def test_the_tokenizer_of_a_model_is_found_beside_it(tmp_path: Path) -> None:
    words = tokenizer.train([TEXT], 300)
    words.enable_padding(length=50)
    run, files = tmp_path / "run", {"tokenizer.json": words.to_str().encode()}
    newest = small_checkpoint.write(run, 7, files=files)
    beside = small_checkpoint.data_of(newest) / "tokenizer.json"
    for source in (beside, beside.parent, newest, newest.with_suffix(""), run):
        assert len(tokenizer.of_source(source).encode("a").ids) == 3
    other = {"tokenizer.json": tokenizer.train([TEXT], 200).to_str().encode()}
    best = small_checkpoint.write(run, 3, ("best",), files=other)
    assert tokenizer.of_source(run).get_vocab_size() == 200
    content = small_checkpoint.data_of(best) / "tokenizer.json"
    content.write_bytes(b"{" * content.stat().st_size)
    with pytest.raises(InputError, match=r"files/3-\w+/tokenizer.json: not a tokenizer.json"):
        tokenizer.of_source(run)
    with pytest.raises(
        InputError, match=r"no tokenizer.json found in .*: pass a checkpoint or run"
    ):
        tokenizer.of_source(tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "byte_bpe"])
def test_every_masked_kind_has_the_special_tokens_in_place(kind: tokenizer.Kind) -> None:
    words = tokenizer.train([TEXT], 300, kind)
    assert specials.find(words, "it") == specials.Specials()
    vocab = words.get_vocab()
    assert sorted(vocab.values()) == list(range(len(vocab)))
    assert len(vocab) <= 300
    assert words.encode("the").tokens[0] == "[CLS]"
    before, after = (words.encode(text, add_special_tokens=False).ids for text in ("the", "of a"))
    # The space before [MASK] does not become a separate token.
    assert words.encode("the [MASK] of a").ids == [2, *before, 4, *after, 3]


def test_bpe_can_encode_every_text() -> None:
    words = tokenizer.train([TEXT], 300, "bpe")
    text = "Ein Ünïcode ☃ snowman, THE end"
    assert 1 not in words.encode(text).ids
    assert words.decode(words.encode(text.replace(" ", " \n ")).ids).strip() == text
    with pytest.raises(InputError, match=r"vocab_size is 260: a bpe tokenizer needs 261"):
        tokenizer.train([TEXT], 260, "bpe")


def test_distinct_words_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_MOST_COUNTED", 20)
    counted = tokenizer._count_words(f"often often word{number}" for number in range(100))
    assert counted["often"] == 200
    assert len(counted) <= 20


def test_the_characters_to_merge_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = ["often often often seldom seldom"]
    assert {"often", "seldom"} <= tokenizer.train(documents, 100).get_vocab().keys()
    monkeypatch.setattr(tokenizer, "_MOST_CHARACTERS", 10)
    vocab = tokenizer.train(documents, 100).get_vocab()
    assert "often" in vocab
    assert "seldom" not in vocab
    assert "##l" in vocab  # the alphabet is that of all words


def test_counting_stretches_equals_normalizing_documents() -> None:
    """Control characters join words, and some characters become several."""
    rng = random.Random(0)
    odd = [*map(chr, range(0x3100)), *"字漢\uf900\ufb01\ufffd🙂가\U00010400", *(" \n\t\r" * 500)]
    texts = ["".join(rng.choices(odd, k=rng.randrange(300))) for _ in range(300)]
    texts += [TEXT, " \n ", "", "字" * 150 + "é" * 101 + " Q" * 120, "x" * 100 + " " + "x" * 101]
    texts += ["A" * 250, "b" * 100 + ",", "c" * 101 + ".", "가" * 60, "x-" * 80]
    lower = tokenizers.normalizers.BertNormalizer(strip_accents=False)
    normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.NFC(), lower])
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    expected: Counter[str] = Counter()
    for text in texts:
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)):
            expected.update(word[at : at + 100] for at in range(0, len(word), 100))
    assert tokenizer._count_words(texts) == expected
    assert expected["x" * 100] == 2


def given(names: tuple[str, ...], *, offset: int = 0) -> tokenizers.Tokenizer:
    """A word-level tokenizer with these special tokens after ``offset`` ordinary words."""
    entries = [f"w{n}" for n in range(offset)] + list(names) + ["end"]
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({entry: i for i, entry in enumerate(entries)}, names[1])
    )
    words.add_special_tokens(list(names))
    return words


def test_special_tokens_are_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    given(SPECIALS, offset=100).save(str(path))
    assert specials.find(tokenizer.load(path, 200, lossless=False), "") == specials.Specials(
        *range(100, 105)
    )
    roberta = ("<s>", "<unk>", "<pad>", "</s>", "<mask>", "<extra>")
    expected = specials.Specials(pad=2, unk=1, cls=0, sep=3, mask=4, others=(5,))
    assert specials.find(given(roberta), "it") == expected
    given(("[PAD]", "[UNK]", "[CLS]", "[SEP]")).save(str(path))
    with pytest.raises(InputError, match=r"has no \[MASK\] \(<mask>\): add them as special tokens"):
        tokenizer.load(path, 200, lossless=False)


@pytest.mark.parametrize("alphabet", ["ACGT", "ACDEFGHIKLMNPQRSTVWY", "กขคงจฉชซ", "가나다라마바"])
def test_long_words_are_cut(alphabet: str) -> None:
    """For training as for encoding."""
    rng = random.Random(0)
    word = "".join(rng.choices(alphabet, k=1050))
    trained = tokenizer.train([f"{word} {word}"], 200)
    pieces = [
        word
        for word, _ in trained.pre_tokenizer.pre_tokenize_str(
            trained.normalizer.normalize_str(word)
        )
    ]
    assert max(map(len, pieces)) == 100
    assert Counter(pieces + pieces) == tokenizer._count_words([f"{word} {word}"])
    assert 1 not in trained.encode(word).ids
    ids = [id for piece in pieces for id in trained.encode(piece, add_special_tokens=False).ids]
    assert trained.encode(word, add_special_tokens=False).ids == ids


@pytest.mark.parametrize(
    ("text", "vocab_size", "why"),
    [
        ("abcdefg", 300, "no character occurs twice in the training text"),
        ("many many words", 6, "model.vocab_size is 6"),
    ],
)
def test_a_vocabulary_of_special_tokens_only_is_refused(
    text: str, vocab_size: int, why: str
) -> None:
    message = f"(wordpiece) has only special tokens, because {why}: add text, or use --data.tok"
    with pytest.raises(InputError, match=re.escape(message)):
        tokenizer.train([text], vocab_size)


def test_cuts_are_removed_only_where_a_long_word_gives_unk() -> None:
    def is_cut(words: tokenizers.Tokenizer) -> bool:
        return "FixedLength" in str(tokenizer.without_cuts(words).pre_tokenizer)

    assert not is_cut(tokenizer.train([TEXT], 300))
    other = tokenizer.train([TEXT], 300)
    other.model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    assert is_cut(other)
    other = tokenizer.train([TEXT], 300)
    other.model.max_input_chars_per_word = 1000
    assert is_cut(other)


def test_documents_begin_and_end_with_the_ids_of_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    words = tokenizer.train([TEXT], 300, "byte_bpe")
    words.save(str(path))
    for bos, eos, prompt, before in (
        *((0, 1, (0,), (1, 0)), (0, 0, (0,), (0,))),
        *((None, 1, (), (1,)), (0, [2, 3], (0,), (2, 0))),
    ):
        config = {"model_type": "llama", "bos_token_id": bos, "eos_token_id": eos}
        (tmp_path / "config.json").write_text(json.dumps(config))
        ends = frozenset(eos if isinstance(eos, list) else [eos])
        assert specials.marks(words, path) == specials.Marks(prompt, before, ends)
