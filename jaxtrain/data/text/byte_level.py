r"""Lossless byte-level byte-pair encoding, for causal language models.

``decode(encode(text)) == text`` for every text: nothing is normalized, white space and line ends
are tokenized like any other text, and each of the 256 bytes has its own token, so none is unknown.
Text is split into words by GPT-4's rule with at most two digits per word (nanochat's variant), and
the bytes of a word are merged. Each token therefore stands for a known number of bytes, even if it
is part of a character, so bits per byte are comparable across tokenizers.
"""

import itertools
import json
import re
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxtrain.data.text import specials, tokenizer_file
from jaxtrain.errors import InputError

WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BYTES = 256
# No word continues across a space that follows a non-space, and the text after that space does not
# affect the words before it. Python's white space is a superset of the rule's, so every cut here is
# also a cut there.
_SURE_CUT = re.compile(r"(?<=\S)(?= )")
# Of the cache of an encoder: its stretches between sure cuts (some 60 MB), and the characters of
# one. Longer ones rarely occur twice. Neither affects tokens.
_MOST_KNOWN, _LONGEST_KNOWN = 1 << 18, 100

_AS_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# Training ignores words of more than 100 characters, such as a line of base64: merging one with a
# million letters takes minutes, and its parts would fill the vocabulary.
_OMIT_LONG = pre_tokenizers.Split(tokenizers.Regex(r"(?m)\A.{101,}\z"), "removed")

# Text that reveals most kinds of loss: a lossy tokenizer does not return it unchanged.
_PROBE = (
    " \n\tTwo  spaces and UPPER case,\r\n\r\n e\u0301 \u00e9 \ufb01 \u216b \u4e2d\u6587 "
    "\U0001f642\u200d\u0000\u007f [SEP] </s> 12345  \n "
)


def _byte_characters() -> str:
    """The 256 characters that stand for the bytes 0 to 255 in the vocabulary (GPT-2's)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(_BYTES) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(_BYTES + number) for number, byte in enumerate(hidden)}
    return "".join(table[byte] for byte in range(_BYTES))


CHARACTERS = _byte_characters()


def check_size(vocab_size: int, kind: str, special: Sequence[str]) -> None:
    """Raises InputError if the vocabulary is too small for the bytes and the special tokens."""
    minimum = len(special) + _BYTES
    if vocab_size < minimum:
        raise InputError(
            f"model.vocab_size is {vocab_size}: a {kind} tokenizer needs {minimum} for the bytes "
            f"and the special tokens alone; set --model.vocab_size to {minimum} or more"
        )


def train(documents: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Trains a tokenizer: special tokens and all 256 bytes, then the most frequent pairs merged.

    The result depends only on the documents, not on the process or its threads.

    Args:
        vocab_size: entries, including :data:`jaxtrain.data.text.specials.CAUSAL`, which come first.
    """
    check_size(vocab_size, "byte_bpe", specials.CAUSAL)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([_splitter(), _OMIT_LONG, _AS_BYTES])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(specials.CAUSAL),
        initial_alphabet=sorted(CHARACTERS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    begin = specials.CAUSAL[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A $B:1",
        special_tokens=[(begin, tokenizer.token_to_id(begin))],
    )
    return tokenizer


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([_splitter(), _AS_BYTES])


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")


class Encoder:
    """Encodes texts, with a cache of stretches: most of a text consists of repeated ones.

    Args:
        tokenizer: as returned by :func:`jaxtrain.data.text.specials.plain`. If it splits words by
            another rule than ours, or changes text, nothing is cached.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        ours = tokenizers.Tokenizer(models.BPE())
        ours.pre_tokenizer = _pre_tokenizer()
        described, wanted = json.loads(tokenizer.to_str()), json.loads(ours.to_str())
        self._cuts = all(
            described[component] == wanted[component]
            for component in ("normalizer", "pre_tokenizer")
        )
        self._cuts &= all(token["special"] for token in described["added_tokens"])
        self._known: dict[str, list[int]] = {}

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Returns the ids of each text, without special tokens."""
        if not self._cuts:
            return self._encode(texts)
        cut = [_SURE_CUT.split(text) for text in texts]
        known = self._known
        unknown = list(
            {pretoken: None for stretches in cut for pretoken in stretches if pretoken not in known}
        )
        known.update(zip(unknown, self._encode(unknown), strict=True))
        ids = [
            list(itertools.chain.from_iterable(map(known.__getitem__, stretches)))
            for stretches in cut
        ]
        for pretoken in unknown:
            if len(pretoken) > _LONGEST_KNOWN:
                del known[pretoken]
        if len(known) > _MOST_KNOWN:
            known.clear()
        return ids

    def _encode(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]


def check(tokenizer: tokenizers.Tokenizer, name: str) -> None:
    """Raises InputError unless every text can be encoded and is decoded unchanged."""
    with tokenizer_file.explained(name):  # the library may reject its own output
        plain = specials.plain(tokenizers.Tokenizer.from_str(tokenizer.to_str()))
    cure = (
        "causal models need a lossless byte-level tokenizer: pass one with --data.tokenizer, or "
        "omit it to train one"
    )
    kind = f"{name}: a {type(plain.model).__name__} tokenizer that"
    absent = [hex(byte) for byte, c in enumerate(CHARACTERS) if plain.token_to_id(c) is None]
    if absent:
        raise InputError(
            f"{kind} has no token for {len(absent)} of 256 bytes, for example {absent[0]}; {cure}"
        )
    for text in [_PROBE, *_PROBE.split(" ")]:
        with tokenizer_file.explained(f"{name} fails on {text!r}"):
            back = plain.decode(plain.encode(text, add_special_tokens=False).ids)
        if back != text:
            raise InputError(f"{kind} turns {text!r} into {back!r}; {cure}")


def as_bytes(tokenizer: tokenizers.Tokenizer) -> list[bytes | None]:
    """Returns the UTF-8 bytes that each id stands for; None for special and for unused ids.

    A token may begin or end inside a character.
    """
    byte_of = {character: byte for byte, character in enumerate(CHARACTERS)}
    bytes_of: list[bytes | None] = [None] * (1 + max(tokenizer.get_vocab().values()))
    for entry, token_id in tokenizer.get_vocab(with_added_tokens=False).items():
        # As the library decodes: an entry with any other character stands for itself.
        known = all(character in byte_of for character in entry)
        bytes_of[token_id] = bytes(map(byte_of.__getitem__, entry)) if known else entry.encode()
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        bytes_of[token_id] = None if token.special else token.content.encode()
    return bytes_of


def lengths(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """Returns the number of UTF-8 bytes that each id stands for, int32 [ids]; 0 if special."""
    return np.array([len(of_id or b"") for of_id in as_bytes(tokenizer)], np.int32)
