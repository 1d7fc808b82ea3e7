"""Tokenizers: trained on a corpus, or read from a ``tokenizer.json``.

Four kinds can be trained; their ids have no gaps. Three are for masked language models and begin
with [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4:

* ``wordpiece``: text is lower-cased and stripped of accents, split at white space and punctuation,
  and each word is split into the longest matching pieces of the vocabulary (BERT's uncased
  tokenizer). The saved file loads in transformers as ``BertTokenizerFast(tokenizer_file=...)``.
* ``bpe``: byte-level byte-pair encoding (GPT-2's, RoBERTa's). It keeps case and can encode any
  text, but reduces each run of white space, including line ends, to one space.
* ``word``: entire words, normalized and split as for ``wordpiece``; all but the most frequent
  words become [UNK].

Both split words after every 100 characters, also in the saved file: the library's WordPiece takes
quadratic time in the length of a word, and would turn longer words into [UNK].

One is for causal language models and begins with the special tokens of
:data:`jaxtrain.data.text.specials.CAUSAL`, from <|bos|> 0:

* ``byte_bpe``: lossless byte-level byte-pair encoding (:mod:`jaxtrain.data.text.byte_level`).
"""

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxtrain.data.text import byte_level, specials, tokenizer_file, word_counts
from jaxtrain.data.text.specials import CLS, SEP, Form
from jaxtrain.data.text.specials import NAMES as SPECIALS
from jaxtrain.errors import InputError

NAME = "tokenizer.json"  # the file's name in a token cache, a checkpoint and an export
Kind = Literal["wordpiece", "bpe", "word", "byte_bpe"]
_CONTINUES = "##"
_LONGEST_WORD = word_counts.LONGEST  # characters; longer words are cut
# Of the distinct words that are merged. A million takes 100 MB and 3 s, so only long words, half a
# million of which would take 5 GB, reach the limit (benchmarks/LOG.md).
_MOST_CHARACTERS = 10_000_000
_BYTES = 256
_RARE_CHARACTER = 1e-6  # characters with a smaller fraction of the text become [UNK]


def wordpiece(vocab: dict[str, int]) -> tokenizers.Tokenizer:
    """Builds the tokenizer of a vocabulary that has the special tokens at their ids."""
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(
            vocab,
            unk_token="[UNK]",
            continuing_subword_prefix=_CONTINUES,
            max_input_chars_per_word=_LONGEST_WORD,
        )
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUES)
    return _with_specials(tokenizer)


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.FixedLength(_LONGEST_WORD)]
    )


def without_cuts(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Returns a copy that does not cut long words, or the same unless it is a WordPiece made here.

    The copy is faster. It encodes a text in the same way or, if the text has a longer word, as
    tokens that contain [UNK].
    """
    described, ours = json.loads(tokenizer.to_str()), json.loads(wordpiece({"[UNK]": 0}).to_str())
    model, our_model = described["model"], ours["model"]
    fields = ("type", "unk_token", "max_input_chars_per_word")
    if described["pre_tokenizer"] == ours["pre_tokenizer"] and all(
        model.get(field) == our_model[field] for field in fields
    ):
        tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _with_specials(
    tokenizer: tokenizers.Tokenizer, mask: str | tokenizers.AddedToken = "[MASK]"
) -> tokenizers.Tokenizer:
    """Registers the special tokens, and adds [CLS] and [SEP] around each text."""
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
    """Trains a tokenizer on texts; see :func:`train_on`."""
    return train_on(count(documents, kind), vocab_size, kind)


def count(documents: Iterable[str], kind: Kind) -> Counter[str]:
    """Counts the words of texts as :func:`train_on` expects them.

    Memory is bounded: above a million distinct words, the rarest so far are dropped.

    Args:
        documents: texts, in order.
        kind: see the module's docstring.
    """
    if kind == "byte_bpe":
        return byte_level.count(documents)
    if kind != "bpe":
        return _count_words(documents)
    words: Counter[str] = Counter()
    for document in documents:
        words.update(document.split())
        word_counts.forget_rare(words)
    return words


def train_on(words: Counter[str], vocab_size: int, kind: Kind) -> tokenizers.Tokenizer:
    """Trains a tokenizer with ``vocab_size`` entries, or fewer if the text has no more.

    The result depends only on the counts, not on their order, the process, or its threads.
    Training uses the half a million most frequent words.

    Args:
        words: the result of :func:`count`.
        vocab_size: entries, including special tokens.
        kind: see the module's docstring.

    Raises:
        InputError: the vocabulary is too small for this kind, or the text has nothing to learn.
    """
    check_room(vocab_size, kind)
    if kind == "bpe":
        return _train_bytes(words, vocab_size)
    if kind == "byte_bpe":
        return byte_level.train_on(words, vocab_size)
    train = _train_words if kind == "word" else _train_pieces
    trained = train(words, vocab_size)
    if trained.get_vocab_size() == len(SPECIALS):
        # A character takes up to two entries, and an alphabet at most two thirds of the vocabulary.
        why = (
            f"model.vocab_size is {vocab_size}"
            if vocab_size < len(SPECIALS) + 3
            else f"no {'word' if kind == 'word' else 'character'} occurs twice in the training text"
        )
        raise InputError(
            f"the trained tokenizer ({kind}) has only special tokens, because {why}: add text, or "
            f"use --data.tokenizer_kind bpe and --model.vocab_size {len(SPECIALS) + _BYTES} or more"
        )
    return trained


def check_room(vocab_size: int, kind: Kind) -> None:
    """Raises InputError if the vocabulary is too small for this kind."""
    least = len(SPECIALS) + _BYTES
    if kind == "bpe" and vocab_size < least:
        raise InputError(
            f"model.vocab_size is {vocab_size}: data.tokenizer_kind=bpe needs {least} for the "
            f"bytes and the special tokens alone; set --model.vocab_size to {least} or more, or "
            "use --data.tokenizer_kind wordpiece"
        )
    if kind == "byte_bpe":
        byte_level.check_room(vocab_size)


def _train_words(words: Counter[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Keeps the most frequent words that occur at least twice; ties are sorted alphabetically."""
    ranked = [word for word, times in word_counts.most_frequent(words) if times > 1]
    entries = [*SPECIALS, *ranked[: vocab_size - len(SPECIALS)]]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({entry: i for i, entry in enumerate(entries)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = _splitter()
    return _with_specials(tokenizer)


def _train_bytes(words: Counter[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Starts from all 256 bytes and merges the most frequent pair until the vocabulary is full."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
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
    # As in RoBERTa: the space before [MASK] belongs to the masked word.
    return _with_specials(tokenizer, tokenizers.AddedToken("[MASK]", lstrip=True, special=True))


def _train_pieces(words: Counter[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Trains WordPiece by merging.

    The vocabulary begins with the most frequent characters, at most two thirds of it. Characters
    that occur once, or make up less than a millionth of the text, are excluded, so that [UNK]
    occurs in training. Then the most frequent pair is merged until the vocabulary is full.

    The library's trainer breaks ties by the order of a hash map, so two runs would differ; passing
    it the alphabet as sorted, ready-made entries avoids that.

    Merging uses all cores. It sees the most frequent words up to 10 million characters.
    """
    alphabet = _alphabet(words, vocab_size)
    characters = [entry for entry in alphabet if not entry.startswith(_CONTINUES)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        # The library ranks the initial alphabet above all counts, so this limit excludes the rest.
        limit_alphabet=len(characters),
        initial_alphabet=characters,
        special_tokens=[*SPECIALS, *alphabet],
        continuing_subword_prefix=_CONTINUES,
        show_progress=False,
    )
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    learner.train_from_iterator(
        word_counts.repeat(dict(word_counts.most_frequent(words, _MOST_CHARACTERS))),
        trainer=trainer,
    )
    vocab = learner.get_vocab(with_added_tokens=False)
    return wordpiece(dict(sorted(vocab.items(), key=lambda item: item[1])))


def _count_words(documents: Iterable[str]) -> Counter[str]:
    """Counts words after normalizing, and splitting as :func:`_splitter` does.

    Text is cut at spaces and line ends, across which normalizing changes nothing, so that each
    distinct stretch is normalized once.
    """
    normalizer, splitter = normalizers.BertNormalizer(), _splitter()

    def cut(document: str) -> list[str]:
        return document.replace("\n", " ").split(" ")

    def split(stretch: str) -> Iterator[str]:
        if stretch.isascii() and len(stretch) <= _LONGEST_WORD:  # most: much faster paths
            if stretch.isalpha():
                yield stretch.lower()
                return
            if stretch[:-1].isalpha() and stretch[-1] in ",.":
                yield from (stretch[:-1].lower(), stretch[-1])
                return
        for piece in normalizer.normalize_str(stretch).split():
            if piece.isalpha() and len(piece) <= _LONGEST_WORD:  # nothing to split
                yield piece
            else:
                yield from (word for word, _ in splitter.pre_tokenize_str(piece))

    return word_counts.count(documents, cut, split)


def _alphabet(words: Counter[str], vocab_size: int) -> list[str]:
    """Returns characters that begin a word and, with ``##``, those that continue one; sorted."""
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
    """Reads a ``tokenizer.json`` and checks that it fits the model and the form.

    Raises:
        InputError: no such file, not a tokenizer, too many entries, missing special tokens, or a
            lossy tokenizer if ``form`` is ``exact``.
    """
    if not path.is_file():
        raise InputError(f"--data.tokenizer {path}: no such file; pass a tokenizer.json")
    tokenizer = tokenizer_file.read(path)
    # Messages have only the path: the file may be from model.init_from or a checkpoint.
    if form == "exact":
        byte_level.check(tokenizer, str(path))
        specials.marks(tokenizer, path)
    else:
        specials.find(tokenizer, str(path))
    check_size(tokenizer, vocab_size, str(path))
    return tokenizer


def check_size(tokenizer: tokenizers.Tokenizer, vocab_size: int, name: str) -> None:
    """Raises unless every id is below ``vocab_size`` and there is an ordinary token.

    Raises:
        InputError: the vocabulary does not fit; the message gives both sizes.
    """
    size = 1 + max(tokenizer.get_vocab().values())
    if size > vocab_size:
        raise InputError(
            f"{name}: its vocabulary has {size} ids, but model.vocab_size is {vocab_size}: "
            f"set --model.vocab_size {size}"
        )
    if size <= len(specials.marked(tokenizer)):
        raise InputError(f"{name}: its vocabulary has only special tokens")


def check_travels(source: Path) -> None:
    """Rejects a weights file, before anything is read.

    Raises:
        InputError: the source is a file, which comes without a tokenizer.
    """
    if source.is_file():
        raise InputError(
            f"{source} is a weights file, which has no tokenizer: pass the checkpoint, the run "
            "directory, or the folder that it comes from"
        )


def decode(path: Path, ids: Sequence[int]) -> str:
    """Decodes ids with a ``tokenizer.json``; special tokens are written out."""
    with tokenizer_file.explained(str(path), quiet=True):
        return str(_read(path).decode(list(ids), skip_special_tokens=False))


@functools.cache
def _read(path: Path) -> tokenizers.Tokenizer:
    return tokenizer_file.read(path)


def of_source(source: Path) -> tokenizers.Tokenizer:
    """Reads the tokenizer that belongs to a model.

    Args:
        source: a checkpoint, a run directory (its best checkpoint, or else its newest), an exported
            folder, or a ``tokenizer.json``.

    Raises:
        InputError: there is none, or it is damaged.
    """
    return tokenizer_file.read(source if source.is_file() else beside(source))


def beside(source: Path) -> Path:
    """Returns the path of the ``tokenizer.json`` in a folder that :func:`of_source` accepts.

    Raises:
        InputError: there is none.
    """
    from jaxtrain.checkpoint import resume  # here, so that worker processes do not load it

    for folder in (source, *resume.complete_of_source(source)):
        if (folder / NAME).is_file():
            return folder / NAME
    raise InputError(
        f"no {NAME} found in {source}: pass a checkpoint or run directory of a text model, a "
        f"folder written by export, or a {NAME}"
    )
