"""Tokenizers: trained on a corpus, or read from a ``tokenizer.json``.

Four kinds are trained here; their ids have no gaps. Three are for masked language models and begin
with [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4:

* ``wordpiece``: text is lower-cased and stripped of accents, split at white space and punctuation,
  and each word is cut into the longest pieces of the vocabulary (BERT's uncased tokenizer). The
  saved file loads in transformers as ``BertTokenizerFast(tokenizer_file=...)``.
* ``bpe``: byte-level byte-pair encoding (GPT-2's, RoBERTa's). Case stays, every text can be
  written, and a run of white space counts as one space: a line end inside a paragraph is one.
* ``word``: whole words, normalised and split as for ``wordpiece``; all but the most frequent ones
  are [UNK].

One is for causal language models and begins with <|bos|> 0 and the others of
:data:`jaxtrain.data.text.specials.CAUSAL`:

* ``byte_bpe``: byte-level byte-pair encoding that gives every text back as it was
  (:mod:`jaxtrain.data.text.byte_level`).
"""

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxtrain.data.text import byte_level, specials, tokenizer_file, word_counts
from jaxtrain.data.text.specials import CLS, SEP, Form
from jaxtrain.data.text.specials import NAMES as SPECIALS
from jaxtrain.errors import InputError

NAME = "tokenizer.json"  # of the file, in a token cache, a checkpoint and an export
Kind = Literal["wordpiece", "bpe", "word", "byte_bpe"]
_CONTINUES = "##"
_LONGEST_WORD = 100  # characters; WordPiece makes [UNK] of a longer one
_BYTES = 256
_RARE_CHARACTER = 1e-6  # a character with a smaller share of the text is cut and becomes [UNK]


def wordpiece(vocab: dict[str, int]) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary that holds the special tokens at their ids."""
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(
            vocab,
            unk_token="[UNK]",
            continuing_subword_prefix=_CONTINUES,
            max_input_chars_per_word=_LONGEST_WORD,
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUES)
    return _with_specials(tokenizer)


def _with_specials(
    tokenizer: tokenizers.Tokenizer, mask: str | tokenizers.AddedToken = "[MASK]"
) -> tokenizers.Tokenizer:
    """Marks the special tokens as such, and puts [CLS] and [SEP] around a text."""
    tokenizer.add_special_tokens([*SPECIALS[:-1], mask])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return tokenizer


def train(
    documents: Iterable[str], vocab_size: int, kind: Kind = "wordpiece"
) -> tokenizers.Tokenizer:
    """Learn a vocabulary of ``vocab_size`` entries, or of fewer where the text gives no more.

    The result depends on the text alone, not on the process or its threads. Memory is bounded:
    of more than a million distinct words those seen once so far are forgotten, and the half a
    million most frequent ones are learned from.

    Args:
        documents: texts, in order.
        vocab_size: entries, with the special ones.
        kind: see the top of this file.

    Raises:
        InputError: the vocabulary is too small for this kind.
    """
    if kind == "word":
        return _train_words(documents, vocab_size)
    if kind == "bpe":
        return _train_bytes(documents, vocab_size)
    if kind == "byte_bpe":
        return byte_level.train(documents, vocab_size)
    return _train_pieces(documents, vocab_size)


def _train_words(documents: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """The most frequent words that were seen twice or more; of equals the alphabet's first."""
    ranked = [
        word for word, count in word_counts.most_frequent(_count_words(documents)) if count > 1
    ]
    entries = [*SPECIALS, *ranked[: vocab_size - len(SPECIALS)]]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _with_specials(tokenizer)


def _train_bytes(documents: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """All 256 bytes, and the most frequent neighbours merged until the vocabulary is full."""
    least = len(SPECIALS) + _BYTES
    if vocab_size < least:
        raise InputError(
            f"model.vocab_size is {vocab_size}: data.tokenizer_kind=bpe needs {least} for the "
            "bytes and the special tokens alone; enlarge it, or take wordpiece"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    words: Counter[str] = Counter()
    for document in documents:
        words.update(document.split())
        word_counts.forget_rare(words)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        word_counts.repeat(dict(word_counts.most_frequent(words))), trainer=trainer
    )
    # As RoBERTa's: the space before [MASK] belongs to the word that it stands for.
    return _with_specials(tokenizer, tokenizers.AddedToken("[MASK]", lstrip=True, special=True))


def _train_pieces(documents: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """WordPiece by merging.

    The most frequent characters come first, at most two thirds of the vocabulary; those with less
    than a millionth of the text, or seen once, are left out, so that [UNK] occurs in training. Then
    the most frequent neighbours are merged until the vocabulary is full.

    The library's trainer by itself breaks ties by the order of a hash map, so two runs differ;
    giving it the alphabet as ready-made entries in sorted order leaves nothing to that order.

    One core for counting, all cores for merging.
    """
    words = _count_words(documents)
    alphabet = _alphabet(words, vocab_size)
    characters = [entry for entry in alphabet if not entry.startswith(_CONTINUES)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        # The library ranks the initial alphabet above every count, so the limit cuts all the rest.
        limit_alphabet=len(characters),
        initial_alphabet=characters,
        special_tokens=[*SPECIALS, *alphabet],
        continuing_subword_prefix=_CONTINUES,
        show_progress=False,
    )
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    learner.train_from_iterator(
        word_counts.repeat(dict(word_counts.most_frequent(words))), trainer=trainer
    )
    vocab = learner.get_vocab(with_added_tokens=False)
    return wordpiece(dict(sorted(vocab.items(), key=lambda item: item[1])))


def _count_words(documents: Iterable[str]) -> Counter[str]:
    """How often each word occurs, after normalizing and cutting at punctuation."""
    normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    chunks: Counter[str] = Counter()
    for document in documents:
        chunks.update(normalizer.normalize_str(document).split())
        word_counts.forget_rare(chunks)
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        if chunk.isalpha():  # nothing to cut, and far quicker
            words[chunk] += count
        else:
            for word, _ in splitter.pre_tokenize_str(chunk):
                words[word] += count
    return Counter({word: n for word, n in words.items() if len(word) <= _LONGEST_WORD})


def _alphabet(words: Counter[str], vocab_size: int) -> list[str]:
    """Characters as they begin a word and, with ``##``, as they continue one; sorted."""
    counts: Counter[str] = Counter()
    continuing: set[str] = set()
    for word, count in words.items():
        for character in word:
            counts[character] += count
        continuing.update(word[1:])
    least = max(2.0, _RARE_CHARACTER * counts.total())
    budget = (vocab_size - len(SPECIALS)) * 2 // 3
    kept: list[str] = []
    for character, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        budget -= 2 if character in continuing else 1
        if count < least or budget < 0:
            break
        kept.append(character)
    kept.sort()
    return kept + [_CONTINUES + c for c in kept if c in continuing]


def load(path: Path, vocab_size: int, form: Form = "sentences") -> tokenizers.Tokenizer:
    """Read a ``tokenizer.json`` and check that it fits the model and what it is to write.

    Raises:
        InputError: no such file, no tokenizer, too many entries, no special tokens, or one that
            loses text where ``form`` is ``exact``.
    """
    if not path.is_file():
        raise InputError(f"--data.tokenizer {path}: no such file")
    tokenizer = tokenizer_file.read(path)
    # Only the path is named: the file may be that of model.init_from or of a checkpoint.
    if form == "exact":
        byte_level.check(tokenizer, str(path))
        specials.begin(tokenizer, str(path))
    else:
        specials.find(tokenizer, str(path))
    check_size(tokenizer, vocab_size, str(path))
    return tokenizer


def check_size(tokenizer: tokenizers.Tokenizer, vocab_size: int, name: str) -> None:
    """Raise unless every id lies below ``vocab_size`` and an ordinary token exists.

    Raises:
        InputError: with both numbers.
    """
    size = 1 + max(tokenizer.get_vocab().values())
    if size > vocab_size:
        raise InputError(
            f"{name}: its vocabulary has {size} ids, the model {vocab_size}: "
            f"set --model.vocab_size {size}"
        )
    if size <= len(specials.marked(tokenizer)):
        raise InputError(f"{name}: its vocabulary has special tokens only")


def check_travels(source: Path) -> None:
    """Refuses a weights file, before anything is read.

    Raises:
        InputError: no tokenizer travels with one.
    """
    if source.is_file():
        raise InputError(
            f"{source} is a file of weights, which has no tokenizer: name the checkpoint, the run "
            "or the folder that it comes from"
        )


def decode(path: Path, ids: Sequence[int]) -> str:
    """The text that ids of a ``tokenizer.json`` stand for, with the special tokens written out."""
    with tokenizer_file.explained(str(path), quiet=True):
        return str(_read(path).decode(list(ids), skip_special_tokens=False))


@functools.cache
def _read(path: Path) -> tokenizers.Tokenizer:
    return tokenizer_file.read(path)


def of_source(source: Path) -> tokenizers.Tokenizer:
    """The tokenizer that travels with a model.

    Args:
        source: a checkpoint, a run's directory (its best checkpoint, or else its newest), an
            exported folder, or a ``tokenizer.json``.

    Raises:
        InputError: there is none, or it is damaged.
    """
    return tokenizer_file.read(source if source.is_file() else beside(source))


def beside(source: Path) -> Path:
    """The ``tokenizer.json`` of a folder that :func:`of_source` takes.

    Raises:
        InputError: there is none.
    """
    from jaxtrain.checkpoint import resume  # here: worker processes need none of it

    for folder in (source, *resume.complete_of_source(source)):
        if (folder / NAME).is_file():
            return folder / NAME
    raise InputError(
        f"{source}: no {NAME} in it: name a checkpoint or a run of a text model, a folder that "
        f"export has written, or a {NAME}"
    )
