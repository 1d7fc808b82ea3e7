"""The code that all text data sets share: from files to token caches.

Files are tokenized once (:mod:`jaxtrain.data.text.tokens`). The supported files are described in
:mod:`jaxtrain.data.text.documents`, the examples made of the tokens in
:mod:`jaxtrain.data.text.config`.
"""

import dataclasses
import functools
import glob
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from jaxtrain.config import overrides
from jaxtrain.data import cache, mixture, quarantine, splits
from jaxtrain.data.engine import Engine
from jaxtrain.data.source import Source, Sources
from jaxtrain.data.text import (
    documents,
    hub_datasets,
    splitting,
    stdlib_corpus,
    tokenizer,
    tokens,
    transformers_files,
    vocabulary,
)
from jaxtrain.data.text.held_out import HeldOut
from jaxtrain.data.text.specials import Form
from jaxtrain.data.text.tokenizer import Kind as TokenizerKind
from jaxtrain.errors import BadExample, InputError, Problem
from jaxtrain.storage.atomic import expanded

_NO_DATA = "no data given: pass a text file, a folder, or a glob with --data.path"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Token caches, and the files they were made from.

    Attributes:
        caches: folder and manifest for each source of text.
        tokenizer: path of their common ``tokenizer.json``.
        kept: what belongs to the tokenizer if it was given, and comes from a transformers folder.
        vocabulary: number of ids in the tokenizer.
        files: number of input files, good and bad.
        bad: the bad files.
        bucket: has the cache; None if it is on disk.
    """

    caches: tuple[tuple[Path, dict[str, Any]], ...]
    tokenizer: Path
    kept: transformers_files.Kept | None
    vocabulary: int
    files: int
    bad: tuple[BadExample, ...]
    bucket: cache.CacheBucket | None

    def total(self, split: str, fact: str) -> int:
        """Sums a count of a split, such as ``documents`` or ``bytes``, over all caches."""
        return sum(manifest["splits"][split][fact] for _, manifest in self.caches)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Where text comes from and how it is loaded."""

    form: ClassVar[Form]
    """Which parts of the documents the tokens keep."""
    most_workers = 8
    """Largest number of workers chosen for a host: one core makes more than a million tokens per
    second (benchmarks/LOG.md, "Text input")."""

    path: str | None = None
    """Text data: a .txt, .md, .jsonl, or .parquet file, a folder (read recursively), a glob,
    s3://BUCKET/PATH or gs://BUCKET/PATH of a file or folder, or
    hf:NAME[@REVISION][:CONFIG[:SPLIT]], a Hugging Face dataset by name or folder (requires the
    extra hf)."""
    more_paths: tuple[str, ...] = ()
    """More sources, each in the same form as path."""
    weights: tuple[float, ...] = ()
    """Relative weights of path and each of more_paths in training, any positive numbers. If empty,
    each source is weighted by its number of sequences. An epoch is as long as all sources
    together."""
    val_path: str | None = None
    """Text for validation, in the same form as path; None splits the text of path."""
    batch_size: int
    """Global batch size: sequences per step, over all devices and microbatches."""
    workers: int | None = None
    """Worker processes that load examples, per host and not per GPU. None uses as many as the
    host's cores allow; 0 loads examples in the main process. The number never changes the examples
    or their order."""
    prefetch: int = 2
    """Batch parts that each worker loads in advance. A process divides its sequences of a batch
    into gcd(workers, devices) parts; with one device, into gcd(workers, sequences)."""
    cache_dir: str | None = None
    """Folder for token caches and fetched data; None uses $JAXTRAIN_CACHE, or else
    ~/.cache/jaxtrain. With s3://BUCKET/PATH or gs://BUCKET/PATH, prepare tokens keeps token caches
    there, training fetches what is there and uploads nothing, and $JAXTRAIN_CACHE has copies."""
    demo: bool = False
    """If path is None, train on the documentation of Python's standard library."""
    max_bad_share: float = 0.1
    """Largest fraction of unusable files, 0 to 1; with more, the run stops."""
    max_examples: int | None = None
    """Documents to use, spread evenly over the corpus; None uses all. Several sources share them in
    proportion to their size, with at least two each. From a Hugging Face dataset, only the first
    documents are fetched: this number, rounded up to a multiple of 10,000. If val_path is set, this
    limits the training documents only. Accepts 500k, 2.5M, 1B."""
    train_split: float = 0.9
    """Fraction of the documents used for training; the rest is for validation. Complete files are
    chosen, or documents of a single file, with at least one on each side. Ignored if val_path is
    set, or if names say what validates: valid.txt beside train.txt, or folders train and val."""
    tokenizer: str | None = None
    """Path of a tokenizer.json; None uses that of model.init_from if set, or else trains one on the
    training split."""
    tokenizer_kind: TokenizerKind = "wordpiece"
    """Kind of tokenizer to train: wordpiece (lowercase), bpe (byte-level, keeps case), or byte_bpe
    (byte-level, lossless; for causal models)."""
    text_field: str | None = None
    """The field of .jsonl objects or the column of .parquet files that holds the text; None uses
    the first of the usual names (text, content, body, ...)."""

    def __post_init__(self) -> None:
        for name in ("max_bad_share", "train_split"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InputError(
                    f"data.{name} is {value}: use a fraction from 0 to 1", about=f"data.{name}"
                )
        least = 1 if self.val_path else 2
        if self.max_examples is not None and self.max_examples < least:
            raise InputError(
                f"data.max_examples is {self.max_examples}: use at least {least}",
                about="data.max_examples",
            )
        if self.more_paths and self.path is None:
            raise InputError(
                "data.more_paths requires data.path: pass the first source with --data.path",
                about=("data.more_paths", "data.path"),
            )
        if self.weights and len(self.weights) != 1 + len(self.more_paths):
            raise InputError(
                f"data.weights has {len(self.weights)} numbers for {1 + len(self.more_paths)} "
                "sources: set one for data.path and one for each of data.more_paths",
                about=("data.weights", "data.path", "data.more_paths"),
            )
        if any(weight <= 0 for weight in self.weights):
            raise InputError(
                f"data.weights is {self.weights}: use numbers above 0, or remove the source",
                about="data.weights",
            )

    def problems(self, model: Any) -> list[str]:
        """Lists problems that depend on the file system, without opening or fetching any file."""
        del model
        missing = self.path is None and not self.demo
        found: list[str] = [Problem(_NO_DATA, "data.path")] if missing else []
        named = [("--data.path", self.path), ("--data.val_path", self.val_path)]
        named += [("--data.more_paths", more) for more in self.more_paths]
        for flag, path in named:
            if path is not None and not hub_datasets.is_named(path) and documents.is_absent(path):
                found.append(Problem(documents.absent(flag, path), flag.removeprefix("--")))
        if self.tokenizer is not None and not os.path.exists(expanded(self.tokenizer)):
            found.append(
                Problem(
                    f"--data.tokenizer {self.tokenizer}: no such file; pass a tokenizer.json, or "
                    "omit it to train one",
                    "data.tokenizer",
                )
            )
        return found

    def prepare(
        self,
        vocab_size: int,
        form: Form,
        say: Callable[[str], None],
        engine: Engine | None = None,
        processes: int | None = None,
        uploads: bool = False,
    ) -> Prepared:
        """Finds and checks the files, and builds their token caches if missing.

        A cache in a bucket is fetched if it is there; if ``uploads``, what is missing there is
        uploaded.

        Worker processes of this machine share the text, ``processes`` or up to one per core. An
        engine reads and tokenizes each file on any of its nodes instead, with the same results.

        Raises:
            TooManyBroken: too many bad files.
            InputError: no path, no text, or a tokenizer that does not fit.
        """
        if self.path is None and not self.demo:
            raise InputError(_NO_DATA)
        root, bucket = cache.root(self.cache_dir), cache.bucket_of(self.cache_dir, uploads=uploads)
        folder = root / "text"
        folder.mkdir(exist_ok=True)
        path = self.path
        if path is None:
            path = str(stdlib_corpus.prepare(root, say) / "*.txt")
        found = [
            self._find(one, flag, folder, say, engine, processes, bucket)
            for flag, one in self.inputs(path)
        ]
        everything = [file for files in found for file in files]
        bad = tuple(BadExample(f.path, f.reason) for f in everything if f.reason is not None)
        # Before the tokenizer and the tokens, which take hours of a large corpus. Neither skips
        # any more files: one that cannot be read then has changed.
        quarantine.skip(bad, len(everything), self.max_bad_share, say)
        if skipped := sum(file.skipped for file in everything):
            lacking = [file.name for file in everything if file.skipped]
            say(f"skipped: {skipped:,} rows without text, in {splits.listed(lacking)}")
        corpora = with_held_out(self.corpora(found, path, say), folder)
        tokenizer_path = vocabulary.prepare(
            corpora,
            vocab_size=vocab_size,
            kind=self.tokenizer_kind,
            form=form,
            given=expanded(self.tokenizer) if self.tokenizer else None,
            folder=folder,
            say=say,
            bucket=bucket,
        )
        caches = tuple(
            tokens.prepare(
                corpus,
                tokenizer_path=tokenizer_path,
                form=form,
                folder=folder,
                say=say,
                processes=processes,
                engine=engine,
                bucket=bucket,
                validation=lambda: (text for corpus in corpora for text in corpus.validation()),
            )
            for corpus in corpora
        )
        manifest = caches[0][1]
        if manifest["vocabulary"] < vocab_size:
            say(
                f"the tokenizer has {manifest['vocabulary']} ids and model.vocab_size is "
                f"{vocab_size}: {vocab_size - manifest['vocabulary']} ids of the model stay unused"
            )
        return Prepared(
            caches=caches,
            tokenizer=caches[0][0] / tokenizer.NAME,
            kept=transformers_files.beside(tokenizer_path),
            vocabulary=manifest["vocabulary"],
            files=len(everything),
            bad=bad,
            bucket=bucket,
        )

    def inputs(self, path: str) -> list[tuple[str, str]]:
        """Returns flag and path of each source of text; that for validation is last.

        Args:
            path: :attr:`path`, or that of the demonstration corpus.
        """
        named = [("--data.path", path), *(("--data.more_paths", more) for more in self.more_paths)]
        return named if self.val_path is None else [*named, ("--data.val_path", self.val_path)]

    def corpora(
        self, found: list[list[documents.Scanned]], path: str, say: Callable[[str], None]
    ) -> list[tokens.Corpus]:
        """Selects and splits the documents.

        Args:
            found: the files of each of :meth:`inputs`.
            path: see :meth:`inputs`.
            say: prints a line on the console.

        Raises:
            InputError: no usable text in one of the inputs.
        """
        named = self.inputs(path)
        good = [_good(files, *where) for files, where in zip(found, named, strict=True)]
        val = good.pop() if self.val_path is not None else []
        validates = {file.sha256 for file in val}
        chosen = [
            self._choose(files, flag, where, say)
            for files, (flag, where) in zip(good, named, strict=False)
        ]
        validates |= {file.sha256 for one in chosen for file, side in one.items() if side == "val"}
        chosen = [
            _without(one, validates, f"{flag} {where}", say)
            for one, (flag, where) in zip(chosen, named, strict=False)
        ]
        quotas = self._quotas([sum(file.documents for file in one) for one in chosen], say)
        made = [
            self._corpus(one, where, quota)
            for one, (_, where), quota in zip(chosen, named, quotas, strict=False)
        ]
        if self.val_path is not None:
            counts = [file.documents for file in val]
            split = splitting.of_sides(counts, [splitting.VAL] * len(val), None)
            field = self._field(self.val_path)
            made.append(tokens.Corpus(files=val, split=split, text_field=field))
        return made

    def sources(
        self, prepared: Prepared, parts: Mapping[str, Sequence[Source]], summary: str
    ) -> Sources:
        """Combines the sources of examples into the result of ``open``.

        Args:
            prepared: the result of :meth:`prepare`.
            parts: for each split, one source of examples per cache with text for it.
            summary: one line for the console.
        """
        return Sources(
            train=mixture.combine(parts["train"], self.weights),
            val=mixture.combine(parts["val"], ()),
            files=prepared.files,
            bad=prepared.bad,
            summary=summary,
            files_to_keep={tokenizer.NAME: prepared.tokenizer.read_bytes()}
            | (
                {transformers_files.NAME: prepared.kept.to_json().encode()} if prepared.kept else {}
            ),
            decode=functools.partial(tokenizer.decode, prepared.tokenizer),
        )

    def with_tokenizer_of(self, model: Any, say: Callable[[str], None]) -> "Text":
        """Returns the config with the tokenizer that ``model.init_from`` was trained with."""
        if self.tokenizer is not None or model.init_from is None:
            return self
        source = expanded(model.init_from)
        if not source.is_dir():
            raise InputError(
                f"model.init_from {source} is not a folder with a {tokenizer.NAME}: pass the "
                "model's tokenizer with --data.tokenizer"
            )
        path = tokenizer.beside(source)
        say(f"tokenizer of model.init_from: {path}")
        return dataclasses.replace(self, tokenizer=str(path))

    def for_resume(self, checkpoint: Path) -> "Text":
        """Returns the config for a resume: with the checkpoint's tokenizer unless another is set.

        So the tokenizer's origin, such as ``model.init_from``, need not exist any more.
        """
        path = checkpoint / tokenizer.NAME
        if self.tokenizer is not None or not path.is_file():
            return self
        return dataclasses.replace(self, tokenizer=str(path))

    def _find(
        self,
        path: str,
        flag: str,
        folder: Path,
        say: Callable[[str], None],
        engine: Engine | None,
        processes: int | None,
        bucket: cache.CacheBucket | None,
    ) -> list[documents.Scanned]:
        if not hub_datasets.is_named(path):
            return documents.scan(
                path, self.text_field, folder, flag, say, engine, processes, bucket
            )
        most = self.max_examples if flag != "--data.val_path" else None
        fetched, parts = hub_datasets.fetch(
            path, flag, folder.parent / "hf", self.text_field, most, say
        )
        pattern = str(Path(glob.escape(str(fetched)), hub_datasets.PARTS))
        return documents.scan(
            pattern, hub_datasets.FIELD, folder, flag, say, engine, processes, bucket
        )[:parts]

    def _field(self, path: str) -> str | None:
        return hub_datasets.FIELD if hub_datasets.is_named(path) else self.text_field

    def _quotas(self, counts: list[int], say: Callable[[str], None]) -> Sequence[int | None]:
        """Returns how many documents to use of each source, in proportion to their size."""
        if self.max_examples is None:
            return [None] * len(counts)
        most = min(self.max_examples, sum(counts))
        least = 1 if self.val_path else 2
        quotas = [max(least, share) for share in mixture.shared_out(most, counts)]
        say(
            f"data.max_examples is {overrides.readable(self.max_examples)}: using "
            f"{sum(map(min, quotas, counts)):,} of {sum(counts):,} documents"
        )
        return list(quotas)

    def _choose(
        self,
        files: list[documents.Scanned],
        flag: str,
        path: str,
        say: Callable[[str], None],
    ) -> dict[documents.Scanned, splits.Side | None]:
        """Returns the files of a source that are used, and the side of each.

        None splits the file by document.

        Args:
            files: the good files.
            flag, path: of the source.
            say: prints which files validate, and which are not used.
        """
        names = [file.name for file in files]
        said = None if hub_datasets.is_named(path) else splits.by_name(names)
        sides = said or ["train"] * len(files)
        if said is not None and ("val" not in said or self.val_path is not None):
            sides = ["train" if side == "train" else "test" for side in said]
        if said is not None:
            splits.report(f"{flag} {path}", names, sides, say)
        used: dict[documents.Scanned, splits.Side | None] = {
            file: side for file, side in zip(files, sides, strict=True) if side in ("train", "val")
        }
        if self.val_path is not None or "val" in used.values():
            return used
        first: dict[str, str] = {}
        groups = [first.setdefault(file.sha256, file.name) for file in used]
        if hub_datasets.is_named(path) or len(set(groups)) == 1:
            # The parts of a fetched dataset count as one file.
            return dict.fromkeys(used)
        trains = splits.by_hash(groups, [file.documents for file in used], self.train_split)
        sides = ["train" if here else "val" for here in trains]
        splits.report(f"{flag} {path}", [file.name for file in used], sides, say)
        return dict(zip(used, sides, strict=True))

    def _corpus(
        self,
        chosen: Mapping[documents.Scanned, splits.Side | None],
        path: str,
        quota: int | None,
    ) -> tokens.Corpus:
        files, counts = list(chosen), [file.documents for file in chosen]
        if None in chosen.values():
            split = splitting.by_document(
                counts,
                path if hub_datasets.is_named(path) else files[0].name,
                train_split=self.train_split,
                max_examples=quota,
            )
        else:
            sides = [splitting.SPLITS.index(side) for side in chosen.values() if side]
            split = splitting.of_sides(counts, sides, quota)
        return tokens.Corpus(files=files, split=split, text_field=self._field(path))


def with_held_out(corpora: list[tokens.Corpus], folder: Path) -> list[tokens.Corpus]:
    """Returns the corpora such that no document for training equals one for validation.

    Args:
        corpora: of all sources.
        folder: for the hashes of the documents for validation.
    """
    val = [corpus for corpus in corpora if corpus.split.kept[splitting.VAL]]
    key = cache.digest([corpus.key() for corpus in val])
    held_out = HeldOut(folder / f"held-out-{key[:20]}.npy")
    return [
        dataclasses.replace(corpus, held_out=held_out)
        if corpus.split.kept[splitting.TRAIN]
        else corpus
        for corpus in corpora
    ]


def _without(
    chosen: Mapping[documents.Scanned, splits.Side | None],
    validates: Collection[str],
    source: str,
    say: Callable[[str], None],
) -> dict[documents.Scanned, splits.Side | None]:
    """Removes from the files for training those whose SHA-256 is in ``validates``.

    Raises:
        InputError: no file is left.
    """
    rest = {
        file: side for file, side in chosen.items() if side == "val" or file.sha256 not in validates
    }
    twice = [file for file in chosen if file not in rest]
    if twice:
        say(
            f"{source}: {len(twice):,} of {len(chosen):,} files are not trained on, because equal "
            f"files validate: {splits.listed([file.name for file in twice])}"
        )
    if set(rest.values()) <= {"val"}:
        raise InputError(
            f"{source}: no text is left for training, because all of it validates; pass other "
            "text with --data.path or --data.val_path"
        )
    return rest


def _good(found: list[documents.Scanned], flag: str, path: str) -> list[documents.Scanned]:
    good = [file for file in found if file.reason is None]
    if not good:
        raise InputError(
            f"{flag} {path}: none of the {len(found)} files can be read; the first is "
            f"{found[0].path}: {found[0].reason}"
        )
    return good
