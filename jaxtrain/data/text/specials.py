"""Special tokens: what they are called, and which ids they have in a tokenizer.

A tokenizer that is trained here has BERT's names at the ids 0 to 4, or nanochat's at 0 to 8. One
that is given may have them anywhere, or RoBERTa's or GPT-2's names; they are found by name.
"""

import dataclasses
from typing import Any, Literal

from jaxtrain.errors import InputError

NAMES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(5)  # where a tokenizer that is trained here has them
_ALSO = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")

# Of a causal language model. The first begins each document, and so ends the one before; the others
# never occur in text: they keep their places for conversations that a model is fine-tuned on.
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

# What a stream of tokens keeps of documents. "sentences": sentences without the white space between
# them, [SEP] after each document, for masked language models. "exact": every byte, <|bos|> before
# each document, for causal ones.
Form = Literal["sentences", "exact"]


@dataclasses.dataclass(frozen=True)
class Specials:
    """Ids of the special tokens; the defaults are those of tokenizers that are trained here.

    Attributes:
        pad: fills a sequence up.
        unk: stands for what the vocabulary cannot write.
        cls: begins a sequence.
        sep: ends a document, and a sequence.
        mask: hides a token.
        others: further special ids of the tokenizer.
    """

    pad: int = PAD
    unk: int = UNK
    cls: int = CLS
    sep: int = SEP
    mask: int = MASK
    others: tuple[int, ...] = ()

    def ids(self) -> tuple[int, ...]:
        """All of them, ascending: never chosen for prediction, never drawn in place of a word."""
        return tuple(sorted({self.pad, self.unk, self.cls, self.sep, self.mask, *self.others}))

    def to_json(self) -> dict[str, Any]:
        """For a manifest."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Specials":
        """What :meth:`to_json` gave, after a manifest."""
        return cls(**{**content, "others": tuple(content["others"])})


def find(tokenizer: Any, name: str) -> Specials:
    """The special tokens of a tokenizer, by name.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        name: what it is called in messages.

    Raises:
        InputError: it lacks one; says which, and the cure.
    """
    found = []
    for one, also in zip(NAMES, _ALSO, strict=True):
        token_id = tokenizer.token_to_id(one)
        found.append(tokenizer.token_to_id(also) if token_id is None else token_id)
    lacking = [
        f"{one} ({also})"
        for one, also, token_id in zip(NAMES, _ALSO, found, strict=True)
        if token_id is None
    ]
    if lacking:
        raise InputError(
            f"{name}: it has no {', '.join(lacking)}: add them as special tokens "
            "(tokenizers: Tokenizer.add_special_tokens), or leave --data.tokenizer out to train one"
        )
    special = marked(tokenizer)
    pad, unk, cls, sep, mask = found
    others = tuple(sorted(special - set(found)))
    return Specials(pad, unk, cls, sep, mask, others)


def check_padding(special: Specials, pad_id: int, name: str) -> None:
    """Holds that a model leaves out what a tokenizer fills up with.

    Args:
        special: of the tokenizer.
        pad_id: of the model.
        name: what the tokenizer is called in messages.

    Raises:
        InputError: with both numbers.
    """
    if special.pad != pad_id:
        raise InputError(
            f"{name}: its padding has id {special.pad}, and model.pad_id is {pad_id}: set "
            f"--model.pad_id {special.pad}, or take the tokenizer that the model was trained with"
        )


def begin(tokenizer: Any, name: str) -> int:
    """The id of the special token that begins a document: <|bos|>, or what stands for it.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        name: what it is called in messages.

    Raises:
        InputError: it has none; says the cure.
    """
    special = marked(tokenizer)
    for one in _BEGINS:
        token_id = tokenizer.token_to_id(one)
        if token_id in special:
            return int(token_id)
    raise InputError(
        f"{name}: it has no special token that begins a document, {' or '.join(_BEGINS)}: add one "
        "(tokenizers: Tokenizer.add_special_tokens), or leave --data.tokenizer out to learn one"
    )


def marked(tokenizer: Any) -> set[int]:
    """Ids that a tokenizer marks as special."""
    return {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def plain(tokenizer: Any) -> Any:
    """The same one, set so that text stays text: a literal "<|bos|>" in it is ordinary pieces."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer
