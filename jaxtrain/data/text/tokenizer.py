"""Tokenizers: trained on a corpus, or read from a ``tokenizer.json``.

Three kinds can be trained; their ids have no gaps. Two are for masked language models and begin
with [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4:

* ``wordpiece``: text is lower-cased, split at white space and punctuation, and each word is split
  into the longest matching pieces of the vocabulary, as by BERT's uncased tokenizer. Accents and
  vowel signs are kept: BERT's would delete the vowels of Hindi and the tones of Vietnamese. Equal
  characters in composed and decomposed form are equal (NFC). Words are split after every 100
  characters, also in the saved file: the library's WordPiece takes quadratic time in the length of
  a word, and would turn longer words into [UNK].
  The file loads in transformers as ``BertTokenizerFast(tokenizer_file=...)``.
* ``bpe``: byte-level byte-pair encoding (GPT-2's, RoBERTa's). It keeps case and can encode any
  text, but reduces each run of white space, including line ends, to one space.

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

from jaxtrain.checkpoint import pointer
from jaxtrain.data.text import byte_level, specials, tokenizer_file
from jaxtrain.data.text.specials import CLS, SEP
from jaxtrain.data.text.specials import NAMES as SPECIALS
from jaxtrain.errors import InputError

NAME = "tokenizer.json"  # the file's name in a token cache, a checkpoint and an export
Kind = Literal["wordpiece", "bpe", "byte_bpe"]
_CONTINUES = "##"
_LONGEST_WORD = 100  # characters; longer words are cut
# Distinct words to count. Rarer words do not affect a vocabulary of some 100,000 entries, and
# memory stays below a GiB.
_MOST_COUNTED = 1_000_000
# Words to merge, and the sum of their lengths. A million characters take 100 MB and 3 s, so only
# long words, half a million of which would take 5 GB, reach the second limit (benchmarks/LOG.md).
_MOST_LEARNED, _MOST_CHARACTERS = 500_000, 10_000_000
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
    tokenizer.normalizer = _normalizer()
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUES)
    return _with_specials(tokenizer)


def _normalizer() -> normalizers.Normalizer:
    lower = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    return normalizers.Sequence([normalizers.NFC(), lower])


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
    """Trains a tokenizer with ``vocab_size`` entries, or fewer if the text has no more.

    The result depends only on the documents, not on the process or its threads.

    Raises:
        InputError: the vocabulary is too small for this kind, or the text has nothing to learn.
    """
    check_size_for(kind, vocab_size)
    if kind == "byte_bpe":
        return byte_level.train(documents, vocab_size)
    if kind == "bpe":
        return _train_bytes(documents, vocab_size)
    trained = _train_pieces(_count_words(documents), vocab_size)
    if trained.get_vocab_size() == len(SPECIALS):
        # A character takes up to two entries, and an alphabet at most two thirds of the vocabulary.
        why = (
            f"model.vocab_size is {vocab_size}"
            if vocab_size < len(SPECIALS) + 3
            else "no character occurs twice in the training text"
        )
        raise InputError(
            f"the trained tokenizer ({kind}) has only special tokens, because {why}: add text, or "
            f"use --data.tokenizer_kind bpe and --model.vocab_size {len(SPECIALS) + _BYTES} or more"
        )
    return trained


def check_size_for(kind: Kind, vocab_size: int) -> None:
    """Raises InputError if the vocabulary is too small for this kind."""
    if kind != "wordpiece":
        special = SPECIALS if kind == "bpe" else specials.CAUSAL
        byte_level.check_size(vocab_size, kind, special)


def _train_bytes(documents: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
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
    tokenizer.train_from_iterator(documents, trainer=trainer)
    # As in RoBERTa: the space before [MASK] belongs to the masked word.
    return _with_specials(tokenizer, tokenizers.AddedToken("[MASK]", lstrip=True, special=True))


def _train_pieces(words: Counter[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Trains WordPiece by merging.

    The vocabulary begins with the most frequent characters, at most two thirds of it. Characters
    that occur once, or make up less than a millionth of the text, are excluded, so that [UNK]
    occurs in training. Then the most frequent pair is merged until the vocabulary is full.

    The library's trainer breaks ties by the order of a hash map, so two runs would differ; passing
    it the alphabet as sorted, ready-made entries avoids that.

    Merging uses all cores. It sees the most frequent words; ties are sorted alphabetically.
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
    learner.train_from_iterator(_repeated(words), trainer=trainer)
    vocab = learner.get_vocab(with_added_tokens=False)
    return wordpiece(dict(sorted(vocab.items(), key=lambda item: item[1])))


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Yields lines in which each of the most frequent words occurs as often as it was counted."""
    characters = 0
    for word, count in sorted(words.items(), key=lambda item: (-item[1], item[0]))[:_MOST_LEARNED]:
        characters += len(word)
        if characters > _MOST_CHARACTERS:
            return
        for start in range(0, count, 10_000):
            yield " ".join([word] * min(count - start, 10_000))


def _count_words(documents: Iterable[str]) -> Counter[str]:
    """Counts words after normalizing, and splitting as :func:`_splitter` does.

    Text is cut at spaces and line ends, across which normalizing changes nothing, so that each
    distinct stretch is normalized once. Memory is bounded: above a million distinct stretches or
    words, the rarest so far are dropped.
    """
    normalizer, splitter = _normalizer(), _splitter()

    def split(stretch: str) -> Iterator[str]:
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(stretch)):
            yield word

    stretches, words = Counter[str](), Counter[str]()
    for document in documents:
        of_document = document.replace("\n", " ").split(" ")
        if max(map(len, of_document)) <= _LONGEST_WORD:
            stretches.update(of_document)  # twice as fast as one at a time
        else:
            for stretch in of_document:
                if len(stretch) <= _LONGEST_WORD:
                    stretches[stretch] += 1
                else:  # text without spaces, too long to keep
                    words.update(split(stretch))
        _forget_rare(stretches)
        _forget_rare(words)
    for stretch, times in stretches.items():
        for word in split(stretch):
            words[word] += times
    _forget_rare(words)
    return words


def _forget_rare(words: Counter[str]) -> None:
    """Drops words seen once, then twice, and so on, until few enough remain."""
    least = 2
    while len(words) > _MOST_COUNTED:
        for word in [word for word, count in words.items() if count < least]:
            del words[word]
        least += 1


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


def load(path: Path, vocab_size: int, *, lossless: bool) -> tokenizers.Tokenizer:
    """Reads a ``tokenizer.json`` and checks that it fits the model.

    Raises:
        InputError: no such file, not a tokenizer, too many entries, missing special tokens, or a
            lossy tokenizer although it must be ``lossless``.
    """
    if not path.is_file():
        raise InputError(f"--data.tokenizer {path}: no such file; pass a tokenizer.json")
    tokenizer = tokenizer_file.read(path)
    # Messages have only the path: the file may be from model.init_from or a checkpoint.
    if lossless:
        byte_level.check(tokenizer, str(path))
        specials.marks(tokenizer, path)
    else:
        specials.find(tokenizer, str(path))
    check_size(tokenizer, vocab_size, str(path))
    return tokenizer


def check_size(tokenizer: tokenizers.Tokenizer, vocab_size: int, name: str) -> None:
    """Raises unless every id is below ``vocab_size`` and there is an ordinary token."""
    size = 1 + max(tokenizer.get_vocab().values())
    if size > vocab_size:
        raise InputError(
            f"{name}: its vocabulary has {size} ids, but model.vocab_size is {vocab_size}: "
            f"set --model.vocab_size {size}"
        )
    if size <= len(specials.marked(tokenizer)):
        raise InputError(f"{name}: its vocabulary has only special tokens")


def check_travels(source: Path) -> None:
    """Rejects a weights file, before anything is read."""
    if source.is_file() and not pointer.is_checkpoint(source):
        raise InputError(
            f"{source} is a weights file, which has no tokenizer: pass the checkpoint, the run "
            "directory, or the folder that it comes from"
        )


def decode(content: str, ids: Sequence[int]) -> str:
    """Decodes ids with the content of a ``tokenizer.json``; special tokens are written out."""
    with tokenizer_file.explained(NAME):
        return str(_parsed(content).decode(list(ids), skip_special_tokens=False))


@functools.lru_cache(maxsize=1)
def _parsed(content: str) -> tokenizers.Tokenizer:
    return tokenizer_file.parsed(content, NAME)


def of_source(source: Path) -> tokenizers.Tokenizer:
    """Reads the tokenizer that belongs to a model.

    Args:
        source: a checkpoint, a run directory (its best checkpoint, or else its newest), an exported
            folder, or a ``tokenizer.json``.

    Raises:
        InputError: there is none, or it is damaged.
    """
    is_file = source.is_file() and not pointer.is_checkpoint(source)
    return tokenizer_file.read(source if is_file else beside(source))


def beside(source: Path) -> Path:
    """Returns the path of the ``tokenizer.json`` in a folder that :func:`of_source` accepts.

    Raises:
        InputError: there is none.
    """
    from jaxtrain.checkpoint import resume  # here, so that worker processes do not load it

    checkpoints = map(pointer.folder_of, resume.likely_checkpoints(source))
    for folder in (source, *checkpoints):
        if (folder / NAME).is_file():
            return folder / NAME
    raise InputError(
        f"no {NAME} found in {source}: pass a checkpoint or run directory of a text model, a "
        f"folder written by export, or a {NAME}"
    )
