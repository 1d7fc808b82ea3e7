"""Configs of text data sets, and the sources of examples that they open.

Both kinds find and tokenize text in the same way (:mod:`jaxtrain.data.text.sources`); an example is
then one look-up in files of numbers, a window of a continuous token stream. ``Masked`` masks some
of its tokens, for masked language models; ``Causal`` gives the next tokens, for causal ones.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from jaxtrain.data.source import ArrayTypes, Sources
from jaxtrain.data.text import specials, tokenizer_file, windows
from jaxtrain.data.text.layout import SPLITS, TOKEN_BYTES, Rule, Split
from jaxtrain.data.text.masking import MaskedSource, masked_count
from jaxtrain.data.text.sources import Prepared, Text
from jaxtrain.data.text.streams import Streams
from jaxtrain.data.text.tokenizer import Kind as TokenizerKind
from jaxtrain.errors import InputError
from jaxtrain.storage import cache

SourceT = TypeVar("SourceT")
_MUCH_LOST = 0.02  # fraction of the characters; below 0.0001 in the documentation of Python


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masked(Text):
    """Windows of a token stream for masked language modeling: [CLS], tokens, [SEP].

    A [SEP] is also between documents; they follow each other as for :class:`Causal`.
    """

    input_kind: ClassVar[str | None] = "masked text"
    lossless = False

    # Fractions of the tokens to predict that become a random token, and that stay unchanged; the
    # others become [MASK]: BERT's (https://arxiv.org/abs/1810.04805).
    random_share: ClassVar[float] = 0.1
    keep_share: ClassVar[float] = 0.1

    tokenizer_kind: Literal["wordpiece", "bpe"] = "wordpiece"
    """Kind of tokenizer to train: wordpiece (lowercase) or bpe (byte-level, keeps case)."""

    def arrays(self, model: Any) -> ArrayTypes:
        """Implements :meth:`jaxtrain.data.contract.DataConfig.arrays`."""
        tokens = ((model.sequence_length,), "int32")
        masked = (masked_count(model.sequence_length, model.mask_fraction),)
        segments = {"segments": tokens} if model.attend == "document" else {}
        return segments | {
            "tokens": tokens,
            "positions": (masked, "int32"),
            "targets": (masked, "int32"),
            "target_weights": (masked, "float32"),
            "weight": ((), "float32"),
        }

    def examples(self, prepared: Prepared, model: Any, say: Callable[[str], None]) -> Sources:
        """Opens both splits of text that is in the cache.

        Args:
            model: provides ``sequence_length``, ``vocab_size``, ``mask_fraction``, ``pad_id``,
                ``attend`` and ``init_from``.

        Raises:
            InputError: no token to predict in a split, or another padding id.
        """
        recipe = prepared.recipe
        special = specials.find(tokenizer_file.parsed(recipe.tokenizer, recipe.name), recipe.name)
        specials.check_padding(special, model.pad_id, "the tokenizer")
        folder, facts = prepared.laid_out(Rule(model.sequence_length - 2, overlap=0), say)

        def make(streams: Streams, fingerprint: str) -> MaskedSource:
            return MaskedSource(
                streams=streams,
                sequence_length=model.sequence_length,
                vocab_size=recipe.ids,
                specials=special,
                mask_fraction=model.mask_fraction,
                random_share=self.random_share,
                keep_share=self.keep_share,
                with_segments=model.attend == "document",
                fingerprint=fingerprint,
            )

        split_sources = _sources_of_splits(prepared, folder, facts, model.sequence_length, make)
        for split in SPLITS:
            self._check_lost(split, facts, split_sources[split].values(), model, say)
        return self.opened(
            prepared,
            split_sources,
            say,
            f"{_facts(prepared, facts, model.sequence_length)}; "
            f"{100 * _lost(facts, 'train'):.2f}% of the characters are lost by the tokenizer, "
            f"vocabulary {recipe.ids:,}",
        )

    def check_length(self, model: Any) -> None:
        """Implements :meth:`Text.check_length`: a sequence has space for a token."""
        if model.sequence_length < 3:
            raise InputError(
                f"model.sequence_length is {model.sequence_length}: use at least 3, for [CLS], a "
                "token, and [SEP]"
            )

    def _check_lost(
        self,
        name: Split,
        facts: "Facts",
        sources: Iterable[MaskedSource],
        model: Any,
        say: Callable[[str], None],
    ) -> None:
        """Warns if the tokenizer loses much of a split.

        Raises:
            InputError: no sequence of the split has a token to predict.
        """
        lost = _lost(facts, name)
        cure = "--data.tokenizer_kind bpe trains one that loses none"
        if self.tokenizer is not None or model.init_from is not None:
            cure += ", without --data.tokenizer and --model.init_from"
        if not any(source.has_targets() for source in sources):
            raise InputError(
                f"no sequence of the {name} split has a token to predict: "
                + (
                    f"its words are unknown to the tokenizer ([UNK]); {cure}"
                    if lost
                    else "its texts are too short; add text"
                )
            )
        if lost > _MUCH_LOST:
            say(
                f"warning: {100 * lost:.2f}% of the characters of the {name} split are lost: the "
                f"tokenizer turns them into [UNK], deletes them, or removes their accents: {cure}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causal(Text):
    """Windows of a token stream for causal language modeling.

    Each document begins with <|bos|>, or what a transformers folder has instead
    (:class:`jaxtrain.data.text.specials.Marks`), and is otherwise unchanged, except that each line
    end of a .txt or .md file becomes one line feed. A .txt or .md file of more than 32,000
    characters is read as several documents, cut at blank lines after 16,000 characters; they are
    split between training and validation, so a book has passages in both. Documents follow each
    other in the order of their hashes.
    """

    input_kind: ClassVar[str | None] = "causal text"
    lossless = True

    fit_documents: bool = False
    """Let each sequence begin with a document, and fill it with the documents that fit best. A
    document that is longer than a sequence is divided, and each piece begins as a document does. If
    off, sequences are windows of all documents in a row."""

    @property
    def tokenizer_kind(self) -> TokenizerKind:
        """Returns the only kind that loses no text."""
        return "byte_bpe"

    def arrays(self, model: Any) -> ArrayTypes:
        """Implements :meth:`jaxtrain.data.contract.DataConfig.arrays`."""
        tokens = ((model.sequence_length,), "int32")
        return {
            "tokens": tokens,
            "targets": tokens,
            "target_bytes": tokens,
            "weight": ((), "float32"),
        }

    def examples(self, prepared: Prepared, model: Any, say: Callable[[str], None]) -> Sources:
        """Opens both splits of text that is in the cache.

        An example is ``tokens``, ``targets`` and ``target_bytes``, int32 [sequence_length]: see
        :meth:`jaxtrain.data.text.windows.WindowSource.example`.

        Args:
            model: provides ``sequence_length``, ``vocab_size`` and ``init_from``.
        """
        length, recipe = model.sequence_length, prepared.recipe
        rule = Rule(length, overlap=1, fit=self.fit_documents)
        folder, facts = prepared.laid_out(rule, say)
        source_of: Callable[..., windows.WindowSource] = windows.WindowSource
        if rule.fit:
            source_of = functools.partial(windows.FittedSource, begin=recipe.marks[-1])

        def make(streams: Streams, fingerprint: str) -> windows.WindowSource:
            return source_of(
                streams=streams,
                token_bytes=str(folder / TOKEN_BYTES),
                sequence_length=length,
                fingerprint=cache.digest(fingerprint, "fit") if rule.fit else fingerprint,
            )

        split_sources = _sources_of_splits(prepared, folder, facts, length, make)
        fitted = ""
        if rule.fit:
            positions = _total(facts, "train", "examples") * length
            padding = 100 * _total(facts, "train", "padding") / positions
            fitted = f"; padding {padding:.2f}% of the training sequences (measured)"
        bytes_per_token = _total(facts, "train", "bytes") / _total(facts, "train", "tokens")
        return self.opened(
            prepared,
            split_sources,
            say,
            f"{_facts(prepared, facts, length)}{fitted}; {bytes_per_token:.2f} bytes per token "
            f"(measured), vocabulary {recipe.ids:,}",
        )


Facts = Sequence[Mapping[Split, Mapping[str, Any]]]
"""Counts for each source and split: see :func:`jaxtrain.data.text.layout.lay_out`."""


def _sources_of_splits(
    prepared: Prepared,
    folder: Path,
    facts: Facts,
    length: int,
    make: Callable[[Streams, str], SourceT],
) -> dict[Split, dict[int, SourceT]]:
    """Makes the source of examples of each split of each source of text, from its reader and its
    fingerprint; returns them by the number of the source of text. Those without text are omitted.
    """
    recipe, split_sources = prepared.recipe, dict[Split, dict[int, SourceT]]()
    for split in SPLITS:
        split_sources[split] = {}
        for number, of_source in enumerate(facts):
            if examples := of_source[split]["examples"]:
                prefix = str(folder / f"{number}.{split}")
                streams = Streams(str(prepared.root), prefix, recipe.dtype.name, examples)
                digest = cache.digest(of_source[split]["sha256"], recipe.key, length)
                split_sources[split][number] = make(streams, digest)
    return split_sources


def _total(facts: Facts, split: Split, name: str) -> int:
    """Sums a count of a split over all sources."""
    return sum(of_source[split][name] for of_source in facts)


def _facts(prepared: Prepared, facts: Facts, sequence_length: int) -> str:
    """Describes each split: documents, tokens, and sequences; and the number of files."""
    descriptions = [
        f"{split}: {_total(facts, split, 'documents'):,} documents, "
        f"{_total(facts, split, 'tokens'):,} tokens, {_total(facts, split, 'examples'):,} "
        f"sequences of {sequence_length}"
        for split in SPLITS
    ]
    cut = ", long files count as several documents" if prepared.cut else ""
    return f"{prepared.files} text files ({len(prepared.bad)} bad){cut}; {'; '.join(descriptions)}"


def _lost(facts: Facts, split: Split) -> float:
    """Returns the fraction of the characters of a split that the tokens do not have."""
    return _total(facts, split, "lost") / _total(facts, split, "characters")
