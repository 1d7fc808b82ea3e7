"""Special tokens: their names, and their ids in a tokenizer.

A tokenizer trained here has BERT's names at ids 0 to 4, or nanochat's at 0 to 8. One given by the
user may use RoBERTa's or GPT-2's names, at any id; special tokens are found by name.
"""

import dataclasses
from pathlib import Path
from typing import Any

from jaxtrain.config import bounds
from jaxtrain.data.text import transformers_files
from jaxtrain.errors import InputError

NAMES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(5)  # their ids in a tokenizer trained here
_ALSO = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")

# For causal language models. The first begins each document, and so ends the previous one; the
# others never occur in text: they are reserved for fine-tuning on conversations.
CAUSAL = (
    "<|bos|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
_BEGINS = (CAUSAL[0], "<|begin_of_text|>", "<|endoftext|>", "<s>")


@dataclasses.dataclass(frozen=True)
class Specials:
    """Ids of the special tokens; the defaults are those of tokenizers trained here.

    Attributes:
        sep: between documents, and at the end of a sequence.
        others: further special ids of the tokenizer.
    """

    pad: int = PAD
    unk: int = UNK
    cls: int = CLS
    sep: int = SEP
    mask: int = MASK
    others: tuple[int, ...] = ()

    def ids(self) -> tuple[int, ...]:
        """Returns all special ids, ascending; masking neither chooses nor draws them."""
        return tuple(sorted({self.pad, self.unk, self.cls, self.sep, self.mask, *self.others}))


def find(tokenizer: Any, name: str) -> Specials:
    """Finds the special tokens of a tokenizer by name.

    Raises:
        InputError: special tokens are missing; the message lists them and the fix.
    """
    ids = []
    for bert, also in zip(NAMES, _ALSO, strict=True):
        token_id = tokenizer.token_to_id(bert)
        ids.append(tokenizer.token_to_id(also) if token_id is None else token_id)
    lacking = [
        f"{bert} ({also})"
        for bert, also, token_id in zip(NAMES, _ALSO, ids, strict=True)
        if token_id is None
    ]
    if lacking:
        raise InputError(
            f"{name} has no {', '.join(lacking)}: add them as special tokens "
            "(tokenizers: Tokenizer.add_special_tokens), or omit --data.tokenizer to train one"
        )
    special = marked(tokenizer)
    pad, unk, cls, sep, mask = ids
    others = tuple(sorted(special - set(ids)))
    return Specials(pad, unk, cls, sep, mask, others)


def check_padding(special: Specials, pad_id: int, name: str) -> None:
    """Raises unless model and tokenizer have the same padding id."""
    if special.pad != pad_id:
        raise InputError(
            f"{name} has padding id {special.pad}, but model.pad_id is {pad_id}: set "
            f"--model.pad_id {special.pad}, or use the tokenizer that the model was trained with"
        )


def begin(tokenizer: Any, name: str) -> int:
    """Returns the id of the special token that begins a document: <|bos|> or its equivalent.

    Raises:
        InputError: there is none; the message gives the fix.
    """
    special = marked(tokenizer)
    for begin_name in _BEGINS:
        token_id = tokenizer.token_to_id(begin_name)
        if token_id in special:
            return int(token_id)
    raise InputError(
        f"{name} has no special token that begins a document, {' or '.join(_BEGINS)}: add one "
        "(tokenizers: Tokenizer.add_special_tokens), or omit --data.tokenizer to train one"
    )


@dataclasses.dataclass(frozen=True)
class Marks:
    """Ids that a causal language model has at the beginning and the end of a document.

    Attributes:
        prompt: before a prompt: the begin token, or nothing if the model has none.
        before: in a token stream, before each document: the end of the previous document, and the
            begin token. One id if both are the same token, or the model has only one of them.
        ends: a generated text ends at any of these.
    """

    prompt: tuple[int, ...]
    before: tuple[int, ...]
    ends: frozenset[int]


def marks(tokenizer: Any, path: Path) -> Marks:
    """Returns the ids that begin and end documents.

    A tokenizer from a transformers folder has the folder's. Others have the same token for both, by
    name, and each of their special tokens ends a generated text.

    Raises:
        InputError: the tokenizer has no such token; or the folder's settings are damaged.
    """
    kept = transformers_files.beside(path)
    if kept is None or (kept.bos is None and not kept.eos):
        mark = begin(tokenizer, str(path))
        return Marks((mark,), (mark,), frozenset(marked(tokenizer)))
    prompt = () if kept.bos is None else (kept.bos,)
    before = prompt if kept.bos in kept.eos else (*kept.eos[:1], *prompt)
    size = 1 + max(tokenizer.get_vocab().values())
    for number in before:
        known = bounds.Bounds(least=0, most=size - 1)
        bounds.check(f"{path.parent}: bos_token_id or eos_token_id", number, known)
    return Marks(prompt, before, frozenset(kept.eos or prompt))


def marked(tokenizer: Any) -> set[int]:
    """Returns the ids that a tokenizer marks as special."""
    return {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def plain(tokenizer: Any) -> Any:
    """Configures a tokenizer to read a literal "<|bos|>" in text as ordinary tokens; returns it."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer
