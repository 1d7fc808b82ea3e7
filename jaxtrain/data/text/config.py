"""Configs of text data sets, and the sources of examples that they open.

Both kinds find and tokenize text in the same way (:mod:`jaxtrain.data.text.sources`); an example is
then one look-up in files of numbers. ``Masked`` gives packed sequences with masked tokens,
for masked language models; ``Causal`` gives windows of a continuous token stream, for causal ones.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.data import cache
from jaxtrain.data.source import Source, Sources
from jaxtrain.data.text import packing, specials, splitting, windows
from jaxtrain.data.text.masking import MaskedSource
from jaxtrain.data.text.sources import Prepared, Text
from jaxtrain.data.text.specials import Specials
from jaxtrain.data.text.tokenizer import Kind as TokenizerKind
from jaxtrain.errors import InputError

_MUCH_UNKNOWN = 0.02  # fraction of the characters; below 0.0001 in the documentation of Python


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masked(Text):
    """Packed sequences for masked language modeling."""

    input_kind = "masked text"
    form = "sentences"

    random_share: float = 0.1
    """Fraction of the tokens to predict that are replaced by a random token, 0 to 1."""
    keep_share: float = 0.1
    """Fraction of the tokens to predict that stay unchanged, 0 to 1; all others become [MASK]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.random_share, self.keep_share) < 0 or self.random_share + self.keep_share > 1:
            raise InputError(
                f"data.random_share={self.random_share} and data.keep_share={self.keep_share} "
                "are fractions: use values of 0 or more that add up to at most 1",
                about=("data.random_share", "data.keep_share"),
            )
        if self.tokenizer_kind == "byte_bpe":
            raise InputError(
                "data.tokenizer_kind=byte_bpe is for causal models and has no [MASK]: use "
                "--data.tokenizer_kind bpe, which is byte-level too",
                about="data.tokenizer_kind",
            )

    def open(
        self, model: Any, *, seed: int, say: Callable[[str], None], uploads: bool = False
    ) -> Sources:
        """Opens both splits; builds the token cache and the packing index if missing.

        Args:
            model: provides ``sequence_length``, ``vocab_size``, ``mask_fraction``, ``pad_id``,
                ``attend`` and ``init_from``.
            seed: the run's seed. The split does not depend on it, so runs that differ only in the
                seed share a cache and validate on the same text.
            say: prints a line on the console.
            uploads: see :meth:`Text.prepare`.

        Raises:
            InputError: no token to predict in a split; or see :meth:`Text.prepare`.
        """
        del seed
        if model.sequence_length < 3:
            raise InputError(
                f"model.sequence_length is {model.sequence_length}: use at least 3, for [CLS], a "
                "token, and [SEP]"
            )
        prepared = self.with_tokenizer_of(model, say).prepare(
            model.vocab_size, self.form, say, uploads=uploads
        )
        special = Specials.from_json(prepared.caches[0][1]["specials"])
        specials.check_padding(special, model.pad_id, "the tokenizer")
        indexes = [
            packing.pack(folder, manifest, model.sequence_length, say, prepared.bucket)
            for folder, manifest in prepared.caches
        ]
        splits: dict[str, list[MaskedSource]] = {}
        for name in splitting.SPLITS:
            splits[name] = [
                MaskedSource(
                    packed=packing.Packed(
                        str(folder / f"{name}.tokens"),
                        manifest["dtype"],
                        str(packed / f"{name}.spans"),
                    ),
                    examples=index[name]["examples"],
                    sequence_length=model.sequence_length,
                    vocab_size=prepared.vocabulary,
                    specials=special,
                    mask_fraction=model.mask_fraction,
                    random_share=self.random_share,
                    keep_share=self.keep_share,
                    with_segments=model.attend == "document",
                    fingerprint=cache.digest(
                        manifest["splits"][name]["sha256"],
                        manifest["tokenizer"],
                        index["version"],
                        model.sequence_length,
                    ),
                    tokenizer_path=str(prepared.tokenizer),
                )
                for (folder, manifest), (packed, index) in zip(
                    prepared.caches, indexes, strict=True
                )
                if index[name]["examples"]
            ]
        for name in splitting.SPLITS:
            self._check_unknown(name, prepared, splits[name], model, say)
        return self.sources(prepared, splits, _summary(prepared, [index for _, index in indexes]))

    def _check_unknown(
        self,
        name: str,
        prepared: Prepared,
        sources: Sequence[MaskedSource],
        model: Any,
        say: Callable[[str], None],
    ) -> None:
        """Warns if the tokenizer loses much of a split.

        Raises:
            InputError: no sequence of the split has a token to predict.
        """
        unknown = _unknown(prepared, name)
        cure = "--data.tokenizer_kind bpe trains one that loses none"
        if self.tokenizer is not None or model.init_from is not None:
            cure += ", without --data.tokenizer and --model.init_from"
        if not any(source.has_targets() for source in sources):
            raise InputError(
                f"no sequence of the {name} split has a token to predict: "
                + (
                    f"its words are unknown to the tokenizer ([UNK]); {cure}"
                    if unknown
                    else "its texts are too short; add text"
                )
            )
        if unknown > _MUCH_UNKNOWN:
            say(
                f"warning: {100 * unknown:.2f}% of the characters of the {name} split are unknown "
                f"to the tokenizer ([UNK]) and are never predicted: {cure}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causal(Text):
    """Windows of a token stream for causal language modeling.

    Each document begins with <|bos|>, or what a transformers folder has instead
    (:class:`jaxtrain.data.text.specials.Marks`), and is otherwise unchanged, except that each line
    end of a .txt or .md file becomes one line feed. A .txt or .md file of more than 32,000
    characters is read as several documents, cut at blank lines after 16,000 characters; they are
    split between training and validation, so a book has passages in both.
    """

    input_kind = "causal text"
    form = "exact"

    tokenizer_kind: TokenizerKind = "byte_bpe"
    """Kind of tokenizer to train: byte_bpe (byte-level, lossless); the other kinds lose text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer_kind != "byte_bpe":
            raise InputError(
                f"data.tokenizer_kind={self.tokenizer_kind} loses text (white space, or case and "
                "rare words), but causal models need a lossless tokenizer: use "
                "--data.tokenizer_kind byte_bpe",
                about="data.tokenizer_kind",
            )

    def open(
        self, model: Any, *, seed: int, say: Callable[[str], None], uploads: bool = False
    ) -> Sources:
        """Opens both splits; builds the token cache if missing.

        An example is ``tokens``, ``targets`` and ``target_bytes``, int32 [sequence_length]: see
        :meth:`jaxtrain.data.text.windows.WindowSource.example`.

        Args:
            model: provides ``sequence_length``, ``vocab_size`` and ``init_from``.
            seed: the run's seed. The split does not depend on it, so runs that differ only in the
                seed share a cache and validate on the same text.
            say: prints a line on the console.
            uploads: see :meth:`Text.prepare`.

        Raises:
            InputError: see :meth:`Text.prepare`.
        """
        del seed
        prepared = self.with_tokenizer_of(model, say).prepare(
            model.vocab_size, self.form, say, uploads=uploads
        )
        splits: dict[str, list[Source]] = {
            name: [
                windows.open_split(folder, manifest, name, model.sequence_length)
                for folder, manifest in prepared.caches
                if manifest["splits"][name]["tokens"]
            ]
            for name in splitting.SPLITS
        }
        length = model.sequence_length
        counts = {name: sum(len(part) for part in parts) for name, parts in splits.items()}
        return self.sources(
            prepared,
            splits,
            f"{_facts(prepared, counts, length)}; "
            f"{prepared.total('train', 'bytes') / prepared.total('train', 'tokens'):.2f} bytes per "
            f"token (measured), vocabulary {prepared.vocabulary:,}",
        )


def _facts(prepared: Prepared, examples: Mapping[str, int], sequence_length: int) -> str:
    """Describes each split: documents, tokens, and sequences; and the number of files."""
    parts = [
        f"{name}: {prepared.total(name, 'documents'):,} documents, "
        f"{prepared.total(name, 'tokens'):,} tokens, {examples[name]:,} sequences of "
        f"{sequence_length}"
        for name in splitting.SPLITS
    ]
    total = sum(prepared.total(name, "documents") for name in splitting.SPLITS)
    cut = ", long files count as several documents" if total > prepared.files else ""
    return f"{prepared.files} text files ({len(prepared.bad)} bad){cut}; {'; '.join(parts)}"


def _summary(prepared: Prepared, indexes: list[dict[str, Any]]) -> str:
    """Returns one line for the console; every number is counted, none is estimated."""
    length = indexes[0]["sequence_length"]

    def of_indexes(name: str, fact: str) -> int:
        return sum(index[name][fact] for index in indexes)

    examples = {name: of_indexes(name, "examples") for name in splitting.SPLITS}
    sequences = examples["train"]
    return (
        f"{_facts(prepared, examples, length)}; "
        f"padding {100 * of_indexes('train', 'padding') / (sequences * length):.2f}% (measured), "
        f"{100 * of_indexes('train', 'cut') / sequences:.0f}% end inside a sentence, "
        f"{100 * _unknown(prepared, 'train'):.2f}% of the characters are unknown to the tokenizer, "
        f"vocabulary {prepared.vocabulary:,}"
    )


def _unknown(prepared: Prepared, split: str) -> float:
    """Returns the fraction of the characters of a split that become [UNK]."""
    return prepared.total(split, "unknown") / prepared.total(split, "characters")
