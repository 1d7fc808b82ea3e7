"""WordPiece tokenizers: trained on a corpus, or read from a ``tokenizer.json``.

Text is lower-cased and stripped of accents, split at white space and punctuation, and each word is
cut into the longest pieces of the vocabulary (BERT's uncased tokenizer). The saved file loads in
transformers as ``BertTokenizerFast(tokenizer_file=...)``.

Ids: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4, then single characters, then pieces in the order
of their merging, without gaps.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxtrain.data.masking import CLS, SEP, SPECIALS
from jaxtrain.errors import InputError

_CONTINUES = "##"
_LONGEST_WORD = 100  # characters; WordPiece makes [UNK] of a longer one
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
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    tokenizer.decoder = decoders.WordPiece(prefix=_CONTINUES)
    return tokenizer


def train(documents: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Learn a vocabulary of ``vocab_size`` entries, or of fewer where the text gives no more.

    The most frequent characters come first, at most two thirds of the vocabulary; those with less
    than a millionth of the text, or seen once, are left out, so that [UNK] occurs in training. Then
    the most frequent neighbours are merged until the vocabulary is full.

    The result depends on the text alone. The library's trainer by itself breaks ties by the order
    of a hash map, so two runs differ; giving it the alphabet as ready-made entries in sorted order
    leaves nothing to that order.

    Memory grows with the distinct words. One core for counting, all cores for merging.
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
    learner.train_from_iterator(_repeat(words), trainer=trainer)
    vocab = learner.get_vocab(with_added_tokens=False)
    return wordpiece(dict(sorted(vocab.items(), key=lambda item: item[1])))


def _count_words(documents: Iterable[str]) -> Counter[str]:
    """How often each word occurs, after normalizing and cutting at punctuation."""
    normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    chunks: Counter[str] = Counter()
    for document in documents:
        chunks.update(normalizer.normalize_str(document).split())
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


def _repeat(words: Counter[str]) -> Iterator[str]:
    """Lines of text in which each word occurs as often as counted."""
    for word, count in words.items():
        while count > 0:
            part = min(count, 10_000)
            yield " ".join([word] * part)
            count -= part


def load(path: Path, vocab_size: int) -> tokenizers.Tokenizer:
    """Read a ``tokenizer.json`` and check that it fits the model.

    Raises:
        InputError: no such file, no tokenizer, too many entries, or other ids of special tokens.
    """
    if not path.is_file():
        raise InputError(f"--data.tokenizer {path}: no such file")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"--data.tokenizer {path}: not a tokenizer.json: {error}") from error
    found = tuple(tokenizer.token_to_id(token) for token in SPECIALS)
    wanted = tuple(range(len(SPECIALS)))
    if found != wanted:
        raise InputError(
            f"--data.tokenizer {path}: the ids of {', '.join(SPECIALS)} are {found}, the model "
            f"needs {wanted}: train one by leaving --data.tokenizer out"
        )
    check_size(tokenizer, vocab_size, f"--data.tokenizer {path}")
    tokenizer.no_padding()
    tokenizer.no_truncation()
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
            f"set --model.vocab-size {size}"
        )
    if size <= len(SPECIALS):
        raise InputError(f"{name}: its vocabulary has special tokens only")
