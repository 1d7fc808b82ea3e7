"""Text data sets: the configs that a run names, and the sources that they open.

Files of documents become a token cache once (:mod:`jaxtrain.data.tokens`); an example is then one
look-up in memory maps and its masking. What a file may be is told in
:mod:`jaxtrain.data.documents`.

``Text`` holds what every text data set needs; ``Masked`` adds what masked language modelling needs.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import cache, documents, masking, packing, stdlib_corpus, tokens
from jaxtrain.data.source import Sources
from jaxtrain.errors import BadExample, InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A token cache and what was found on the way to it.

    Attributes:
        folder: the cache's folder.
        manifest: its manifest.
        files: input files found, good and bad.
        bad: the bad ones.
    """

    folder: Path
    manifest: dict[str, Any]
    files: int
    bad: tuple[BadExample, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Where text comes from and how it is fed."""

    path: str | None = None
    """A text file, a folder (read recursively) or a glob: .txt, .md, .jsonl, .parquet."""
    val_path: str | None = None
    """The same for validation; None splits path."""
    batch_size: int
    """Sequences in a batch, over all devices and accumulation."""
    workers: int = 2
    """Processes that make examples; 0 makes them in the main process."""
    prefetch: int = 2
    """Batches that each worker makes in advance."""
    cache_dir: str | None = None
    """Folder for token caches; None is $JAXTRAIN_CACHE, else ~/.cache/jaxtrain."""
    demo: bool = False
    """With path None: train on the documentation of Python's standard library."""
    max_bad_share: float = 0.1
    """Stop if more than this share of the files cannot be read, 0 to 1."""
    max_examples: int | None = None
    """Documents to use, spread evenly over the corpus; None is all. With val_path: documents to
    train on."""
    train_split: float = 0.9
    """Share of the files (of the documents, where there is one file) that trains; the rest
    validates, at least one each. Without meaning where val_path is given."""
    tokenizer: str | None = None
    """A tokenizer.json to use; None learns one from the training split."""
    text_field: str | None = None
    """The field of .jsonl objects or the column of .parquet files that holds the text; None takes
    the first of the usual names (text, content, body, ...)."""

    def __post_init__(self) -> None:
        for name in ("max_bad_share", "train_split"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InputError(f"data.{name} is a share from 0 to 1, not {value}")
        least = 1 if self.val_path else 2
        if self.max_examples is not None and self.max_examples < least:
            raise InputError(f"data.max_examples is {self.max_examples}, it must be >= {least}")

    def prepare(self, vocab_size: int, say: Callable[[str], None]) -> Prepared:
        """Find the files, check them, and bring the token cache up to date.

        Raises:
            InputError: no path, no text, too many bad files, a tokenizer that does not fit.
        """
        root = cache.root(self.cache_dir)
        folder = root / "text"
        path = self.path
        if path is None:
            if not self.demo:
                raise InputError(
                    "no data given: name a text file, a folder or a glob with --data.path"
                )
            path = str(stdlib_corpus.prepare(root, say))
        folder.mkdir(exist_ok=True)
        found = documents.scan(path, self.text_field, folder, "--data.path", say)
        good = self._good(found, "--data.path", say)
        counts = [file.documents for file in good]
        if self.val_path is None:
            val_found: list[documents.Scanned] = []
            splits = tokens.assign(
                counts,
                [file.name for file in good],
                train_split=self.train_split,
                max_examples=self.max_examples,
            )
        else:
            val_found = documents.scan(
                self.val_path, self.text_field, folder, "--data.val_path", say
            )
            val_good = self._good(val_found, "--data.val_path", say)
            splits = tokens.assign_all(counts, tokens.TRAIN, self.max_examples)
            splits += tokens.assign_all([f.documents for f in val_good], tokens.VAL, None)
            good = good + val_good
        target, manifest = tokens.prepare(
            tokens.Corpus(files=good, splits=splits, text_field=self.text_field),
            vocab_size=vocab_size,
            tokenizer_path=Path(self.tokenizer).expanduser() if self.tokenizer else None,
            folder=folder,
            say=say,
        )
        if manifest["vocabulary"] < vocab_size:
            say(
                f"the text gives a vocabulary of {manifest['vocabulary']}, the model has "
                f"{vocab_size}: the other {vocab_size - manifest['vocabulary']} ids stay unused"
            )
        everything = found + val_found
        return Prepared(
            folder=target,
            manifest=manifest,
            files=len(everything),
            bad=tuple(BadExample(f.path, f.reason) for f in everything if f.reason is not None),
        )

    def _good(
        self, found: list[documents.Scanned], flag: str, say: Callable[[str], None]
    ) -> list[documents.Scanned]:
        good = [file for file in found if file.reason is None]
        bad = [file for file in found if file.reason is not None]
        for file in bad[:5]:
            say(f"left out {file.path}: {file.reason}")
        if not good:
            raise InputError(
                f"{flag}: none of {len(found)} files can be read; the first is "
                f"{bad[0].path}: {bad[0].reason}"
            )
        return good


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masked(Text):
    """Packed sequences for masked language modelling."""

    random_share: float = 0.1
    """Share of the chosen tokens that become a random token, 0 to 1."""
    keep_share: float = 0.1
    """Share of the chosen tokens that stay as they are, 0 to 1; all others become [MASK]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.random_share, self.keep_share) < 0 or self.random_share + self.keep_share > 1:
            raise InputError(
                f"data.random_share={self.random_share} and data.keep_share={self.keep_share} "
                "are shares: neither below 0, together at most 1"
            )

    def open(self, model: Any, *, seed: int, say: Callable[[str], None]) -> Sources:
        """Open both splits, building the token cache and the packing index where there is none.

        Args:
            model: its ``sequence_length``, ``vocab_size`` and ``mask_fraction`` are read.
            seed: of the run; the split does not depend on it, so that runs that differ in the seed
                share a cache and are validated on the same text.
            say: takes messages for the console.

        Raises:
            InputError: see :meth:`Text.prepare`.
        """
        del seed
        if model.sequence_length < 3:
            raise InputError(
                f"model.sequence_length is {model.sequence_length}: [CLS], a token and [SEP] need 3"
            )
        prepared = self.prepare(model.vocab_size, say)
        folder, index = packing.pack(prepared.folder, prepared.manifest, model.sequence_length, say)
        train, val = (
            MaskedSource(
                packed=packing.Packed(
                    str(prepared.folder / f"{name}.tokens"),
                    prepared.manifest["dtype"],
                    str(folder / f"{name}.npy"),
                ),
                examples=index[name]["examples"],
                sequence_length=model.sequence_length,
                vocab_size=prepared.manifest["vocabulary"],
                mask_fraction=model.mask_fraction,
                random_share=self.random_share,
                keep_share=self.keep_share,
                fingerprint=cache.digest(
                    prepared.manifest["splits"][name]["sha256"],
                    prepared.manifest["tokenizer"],
                    index["version"],
                    model.sequence_length,
                ),
                tokenizer_path=str(prepared.folder / "tokenizer.json"),
            )
            for name in tokens.SPLITS
        )
        return Sources(
            train=train,
            val=val,
            files=prepared.files,
            bad=prepared.bad,
            summary=_summary(prepared, index),
        )


def _summary(prepared: Prepared, index: dict[str, Any]) -> str:
    """One line for the console; every number is counted, none estimated."""
    splits = prepared.manifest["splits"]
    parts = [
        f"{name}: {splits[name]['documents']:,} documents, {splits[name]['tokens']:,} tokens, "
        f"{index[name]['examples']:,} sequences of {index['sequence_length']}"
        for name in tokens.SPLITS
    ]
    return (
        f"{prepared.files} text files ({len(prepared.bad)} bad); {'; '.join(parts)}; "
        f"padding {100 * index['train']['padding']:.1f}%, "
        f"{100 * index['train']['cut']:.0f}% end inside a sentence, "
        f"vocabulary {prepared.manifest['vocabulary']:,}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedSource:
    """One split as masked sequences; see :class:`jaxtrain.data.source.Source`.

    Attributes:
        packed: reads the sequences.
        examples: their number.
        sequence_length: tokens of an example, padding included.
        vocab_size: ids that the tokenizer has; no other one is ever given.
        mask_fraction: share of the ordinary tokens that is chosen.
        random_share: share of the chosen that become a random token.
        keep_share: share of the chosen that stay.
        fingerprint: digest of the token stream, the tokenizer and the packing. Masking is not in
            it: it changes no example's text, order or number, so a run may resume with another.
        tokenizer_path: the ``tokenizer.json`` of the ids.
    """

    packed: packing.Packed
    examples: int
    sequence_length: int
    vocab_size: int
    mask_fraction: float
    random_share: float
    keep_share: float
    fingerprint: str
    tokenizer_path: str

    def __len__(self) -> int:
        return self.examples

    def sequence(self, index: int) -> np.ndarray:
        """Example ``index`` without masking: [CLS] tokens [SEP] and padding, int32 [S]."""
        text = self.packed[index]
        sequence_S = np.full(self.sequence_length, masking.PAD, np.int32)
        sequence_S[0] = masking.CLS
        sequence_S[1 : len(text) + 1] = text
        sequence_S[len(text) + 1] = masking.SEP
        return sequence_S

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Example ``index``, masked by ``rng``: see :func:`jaxtrain.data.masking.mask`."""
        return masking.mask(
            self.sequence(index),
            rng,
            mask_fraction=self.mask_fraction,
            random_share=self.random_share,
            keep_share=self.keep_share,
            vocab_size=self.vocab_size,
        )
