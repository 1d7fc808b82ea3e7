"""The code that all text data sets share: from files to token caches.

Files are tokenized once (:mod:`jaxtrain.data.text.shards`). The supported files are described in
:mod:`jaxtrain.data.text.documents`, the examples made of the tokens in
:mod:`jaxtrain.data.text.config`.
"""

import dataclasses
import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from jaxtrain.checkpoint import pointer
from jaxtrain.config import bounds
from jaxtrain.data import listing, mixture, quarantine, splits
from jaxtrain.data.contract import DataConfig
from jaxtrain.data.source import Source, Sources
from jaxtrain.data.text import (
    documents,
    hub_datasets,
    kinds,
    layout,
    rows,
    shards,
    specials,
    stdlib_corpus,
    tokenizer,
    tokenizer_file,
    transformers_files,
    vocabulary,
)
from jaxtrain.data.text.layout import SPLITS, Corpus, Rule, Split
from jaxtrain.data.text.rows import Rows
from jaxtrain.data.text.shards import CachedShard, Recipe, Shard
from jaxtrain.data.text.tokenizer import Kind as TokenizerKind
from jaxtrain.errors import BadExample, InputError, Problem
from jaxtrain.jobs import resumable
from jaxtrain.jobs.engines import Engine
from jaxtrain.storage import addresses, cache
from jaxtrain.storage.atomic import expanded

_NO_DATA = "no data given: pass a text file, a folder, or a glob with --data.path"
_FIELD_VERSION = 2  # of the rule that chooses the field with the text
_LISTED = 5  # files with bad rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """The text of a config in the cache.

    Attributes:
        root: folder of the shards.
        tokenizer: path of the ``tokenizer.json``.
        cut: whether some are so long that they are several documents.
        bucket: has the cache; None if it is on disk.
    """

    corpora: tuple[Corpus, ...]
    root: Path
    tokenizer: Path
    recipe: Recipe
    files: int
    cut: bool
    bad: tuple[BadExample, ...]
    bucket: cache.CacheBucket | None

    def laid_out(self, rule: Rule, say: Callable[[str], None]) -> layout.LaidOut:
        """Finds the examples: see :func:`jaxtrain.data.text.layout.lay_out`."""
        return layout.lay_out(self.corpora, rule, self.recipe, self.root, say, self.bucket)


@dataclasses.dataclass(frozen=True)
class _Source:
    """The files of a source, in shards.

    Attributes:
        name: the flag and its value.
        shards: those to use, each with its side; None splits its documents.
        max_documents: how many to use; None uses all.
    """

    name: str
    files: tuple[documents.File, ...]
    shards: tuple[tuple[Shard, Split | None], ...]
    max_documents: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(DataConfig):
    """Where text comes from and how it is loaded."""

    lossless: ClassVar[bool]
    """Whether the tokens must have every byte of the documents."""
    most_workers: ClassVar[int | None] = 8
    """Largest number of workers chosen for a host: one core makes more than a million tokens per
    second (benchmarks/LOG.md, "Text input")."""

    path: str | None = None
    """Text data: a .txt, .md, .jsonl, or .parquet file, a .txt, .jsonl, or .json file that is
    compressed (.gz, .zst, .bz2, .xz), a folder (read recursively), a glob,
    s3://BUCKET/PATH or gs://BUCKET/PATH of a file or folder, or
    hf:NAME[@REVISION][:GLOB], the files of a dataset on the Hugging Face Hub."""
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
    ~/.cache/jaxtrain. With s3://BUCKET/PATH or gs://BUCKET/PATH, token caches are kept there, and
    $JAXTRAIN_CACHE has copies."""
    demo: bool = False
    """If path is None, train on the documentation of Python's standard library."""
    max_bad_share: bounds.ClosedFraction = 0.1
    """Largest fraction of unusable files, 0 to 1; with more, the run stops. Also the largest
    fraction of unusable rows of a .jsonl or .parquet file: those are skipped; a file with more is
    unusable."""
    max_examples: int | None = None
    """Documents to use; None uses all. Those of the first files, ordered by the hashes of their
    names, are used, chosen by their own hashes. Several sources share them in proportion to the
    size of their files, with at least two each. If val_path is set, this limits the training
    documents only. Accepts 500k, 2.5M, 1B."""
    val_documents: bounds.Count | None = None
    """Documents that are enough for validation. The fraction that validates is the smallest of a
    tenth, a twentieth, and so on, with so many of them; the hash of a document's text decides, with
    at least one document on each side. None uses a tenth of up to 100 MB of text, 5 to 10 MB of up
    to 800 MB, 0.625% of up to 12.8 GB, and 40 to 80 MB of more. Ignored if val_path is set, or if
    names say what validates: valid.txt beside train.txt, or folders train and val."""
    tokenizer: str | None = None
    """Path of a tokenizer.json; None uses that of model.init_from if set, or else trains one on the
    training split."""
    text_field: str | None = None
    """The field of .jsonl objects or the column of .parquet files that holds the text. None uses
    text if most rows have it, or else the only usual name (content, body, ...) that most rows
    have, in any case of letters."""

    @property
    def tokenizer_kind(self) -> TokenizerKind:
        """Returns the kind of tokenizer to train."""
        raise NotImplementedError

    def check(self) -> None:
        """Implements :meth:`bounds.Section.check`."""
        minimum = 1 if self.val_path else 2
        if self.max_examples is not None and self.max_examples < minimum:
            raise InputError(
                f"data.max_examples is {self.max_examples}: use at least {minimum}",
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
        """Implements :meth:`DataConfig.problems`."""
        del model
        missing = self.path is None and not self.demo
        listed: list[str] = [Problem(_NO_DATA, "data.path")] if missing else []
        named = [("--data.path", self.path), ("--data.val_path", self.val_path)]
        named += [("--data.more_paths", more) for more in self.more_paths]
        for flag, path in named:
            if path is None or hub_datasets.is_named(path) or addresses.is_address(path):
                continue
            problem = documents.absent(flag, path) if documents.is_absent(path) else ""
            problem = problem or listing.in_run(expanded(path).absolute(), flag)
            if problem:
                listed.append(Problem(problem, flag.removeprefix("--")))
        if self.tokenizer is not None and not os.path.exists(expanded(self.tokenizer)):
            listed.append(
                Problem(
                    f"--data.tokenizer {self.tokenizer}: no such file; pass a tokenizer.json, or "
                    "omit it to train one",
                    "data.tokenizer",
                )
            )
        return listed

    def check_length(self, model: Any) -> None:
        """Raises InputError if ``model.sequence_length`` is too short for these examples."""

    def examples(self, prepared: Prepared, model: Any, say: Callable[[str], None]) -> Sources:
        """Opens both splits of text that is in the cache; see the subclasses."""
        raise NotImplementedError

    def open(self, model: Any, *, seed: int, say: Callable[[str], None]) -> Sources:
        """Opens both splits; makes the tokens and finds the examples that the cache lacks.

        Args:
            seed: the run's seed. The split does not depend on it, so runs that differ only in the
                seed share a cache and validate on the same text.
        """
        del seed
        prepared = self.prepare(model, say)
        assert prepared is not None
        return self.examples(prepared, model, say)

    def prepare(
        self,
        model: Any,
        say: Callable[[str], None],
        *,
        engine: Engine | None = None,
        part: resumable.Part = resumable.ALL,
        uploads: bool = False,
    ) -> Prepared | None:
        """Finds the files, and tokenizes those that the cache does not have.

        From a cache in a bucket, what is missing on this disk is fetched. Shards that the bucket
        does not have are made there.

        Args:
            model: provides ``vocab_size`` and ``init_from``.
            engine: where shards are made; None uses the cores of this machine.
            uploads: whether a bucket gets the tokenizer and the examples, too.

        Returns:
            The tokens; None if other parts have yet to make some.

        Raises:
            InputError: no path, no text, or a tokenizer that does not fit.
            RunAgain: a disk, the bucket or the Hub is full or unavailable.
        """
        if self.path is None and not self.demo:
            raise InputError(_NO_DATA)
        self.check_length(model)
        top, url = cache.root(self.cache_dir), cache.url(self.cache_dir)
        bucket = None if url is None else cache.CacheBucket(url, top, uploads)
        root = top / "text"
        root.mkdir(exist_ok=True)
        path = self.path
        if path is None:
            path = str(stdlib_corpus.prepare(top, say) / "*.txt")
        sources = self._sources(path, top, say)
        tokenizer_path = vocabulary.prepare(
            self._samples(sources),
            vocab_size=model.vocab_size,
            kind=self.tokenizer_kind,
            lossless=self.lossless,
            tokenizer_path=self._given_tokenizer(model, say),
            folder=root,
            say=say,
            bucket=bucket,
        )
        recipe = _recipe(tokenizer_path, self.lossless)
        if recipe.ids < model.vocab_size:
            say(
                f"the tokenizer has {recipe.ids} ids and model.vocab_size is {model.vocab_size}: "
                f"{model.vocab_size - recipe.ids} ids of the model stay unused"
            )
        all_shards = [shard for source in sources for shard, _ in source.shards]
        if not shards.prepare(
            all_shards, recipe, root, say, engine=engine, part=part, bucket=bucket
        ):
            return None
        cached_shards = {
            shard: CachedShard.of(root / shard.folder(recipe), recipe.dtype) for shard in all_shards
        }
        bad = _bad(sources, cached_shards)
        total = sum(len(source.files) for source in sources)
        quarantine.name_first(tuple(bad.values()), say)
        _report_skipped(cached_shards.values(), say)
        train_split = 1 - self._held_out(sources, cached_shards, say)
        return Prepared(
            corpora=tuple(
                self._corpus(source, cached_shards, bad, train_split) for source in sources
            ),
            root=root,
            tokenizer=tokenizer_path,
            recipe=recipe,
            files=total,
            cut=any(documents.is_cut(file) for source in sources for file in source.files),
            bad=tuple(bad.values()),
            bucket=bucket,
        )

    def opened(
        self,
        prepared: Prepared,
        split_sources: Mapping[Split, Mapping[int, Source]],
        say: Callable[[str], None],
        summary: str,
    ) -> Sources:
        """Combines the sources of examples into the result of ``open``.

        Args:
            split_sources: of each split, the source of examples of each text source that has some.
        """
        for number in range(1 + len(self.more_paths)):
            if number not in split_sources["train"]:
                say(f"warning: {prepared.corpora[number].name} has no text for training")
        content = prepared.recipe.tokenizer
        kept = transformers_files.beside(prepared.tokenizer)
        return Sources(
            train=mixture.combine(
                list(split_sources["train"].values()),
                [self.weights[number] for number in split_sources["train"]] if self.weights else (),
            ),
            val=mixture.combine(list(split_sources["val"].values()), ()),
            files=prepared.files,
            bad=prepared.bad,
            summary=summary,
            files_to_keep={tokenizer.NAME: content.encode()}
            | ({transformers_files.NAME: kept.to_json().encode()} if kept else {}),
            decode=functools.partial(tokenizer.decode, content),
        )

    def for_resume(self, checkpoint: Path) -> Self:
        """Returns the config for a resume: with the checkpoint's tokenizer unless another is set.

        So the tokenizer's origin, such as ``model.init_from``, need not exist any more.
        """
        path = pointer.folder_of(checkpoint) / tokenizer.NAME
        if self.tokenizer is not None or not path.is_file():
            return self
        return dataclasses.replace(self, tokenizer=str(path))

    def _given_tokenizer(self, model: Any, say: Callable[[str], None]) -> Path | None:
        """Returns the given ``tokenizer.json``, or that which ``model.init_from`` has."""
        if self.tokenizer is not None:
            return expanded(self.tokenizer)
        if model.init_from is None:
            return None
        source = expanded(model.init_from)
        if not (source.is_dir() or pointer.is_checkpoint(source)):
            raise InputError(
                f"model.init_from {source} is not a folder with a {tokenizer.NAME}: pass the "
                "model's tokenizer with --data.tokenizer"
            )
        path = tokenizer.beside(source)
        say(f"tokenizer of model.init_from: {path}")
        return path

    def _sources(self, path: str, top: Path, say: Callable[[str], None]) -> list[_Source]:
        """Finds the files of each source; that for validation is last."""
        named = [("--data.path", path), *(("--data.more_paths", more) for more in self.more_paths)]
        sources = []
        for flag, location in named:
            files = documents.find(location, flag, top, say)
            sides = self._sides(files, f"{flag} {location}", say)
            row_settings = self._rows(list(sides), f"{flag} {location}", top / "text", say)
            used = tuple(
                (shard, side)
                for side in sorted(set(sides.values()), key=str)
                for shard in shards.plan(
                    [file for file in sides if sides[file] == side], row_settings
                )
            )
            sources.append(_Source(f"{flag} {location}", tuple(files), used))
        if self.max_examples is not None:
            sources = self._limited(sources, top / "text", say)
        if self.val_path is not None:
            files = documents.find(self.val_path, "--data.val_path", top, say)
            row_settings = self._rows(files, f"--data.val_path {self.val_path}", top / "text", say)
            val = tuple((shard, SPLITS[1]) for shard in shards.plan(files, row_settings))
            sources.append(_Source(f"--data.val_path {self.val_path}", tuple(files), val))
        return sources

    def _rows(
        self,
        files: Sequence[documents.File],
        name: str,
        folder: Path,
        say: Callable[[str], None],
    ) -> Rows:
        """Returns how to read the rows of a source; finds and prints the field with the text."""
        with_rows = [file for file in files if not kinds.is_plain(file.name)]
        if self.text_field is not None or not with_rows:
            return Rows(self.text_field, self.max_bad_share)

        def build(work: Path) -> dict[str, Any]:
            say(f"{name}: looking for the field with the text in {len(with_rows):,} files")
            return {"field": rows.choose(with_rows, name, "--data.text_field")}

        described = [(file.name, file.size, file.version) for file in with_rows]
        key = cache.digest(_FIELD_VERSION, described)
        chosen = cache.make_folder(folder / f"field-{key[:20]}", build, say)["field"]
        if chosen is None:
            return Rows(None, self.max_bad_share)
        field = rows.Field(*chosen)
        say(
            f"{name}: the text is in the field {field.name!r}, which {field.has:,} of the "
            f"{field.of:,} rows have that were read to choose it"
        )
        return Rows(field.name, self.max_bad_share)

    def _sides(
        self, files: Sequence[documents.File], name: str, say: Callable[[str], None]
    ) -> dict[documents.File, Split | None]:
        """Returns the files of a source that are used, and the side of each; None is split."""
        names = [file.name for file in files]
        all_train = self.val_path is not None
        # Names of Python's modules say nothing.
        warn = say if self.path is not None else lambda line: None
        sides = splits.decided(name, names, warn, all_train=all_train)
        splits.report(name, names, sides, say, decided="words in their names")
        used: dict[documents.File, Split | None] = {
            file: side for file, side in zip(files, sides, strict=True) if side in ("train", "val")
        }
        if all_train:
            say(f"{name}: the text of data.val_path validates")
        elif "val" not in sides:
            of = "all documents" if len(used) == len(files) else "the other files' documents"
            say(f"{name}: no names say what validates, so a part of {of} does")
            return dict.fromkeys(used)
        return used

    def _limited(
        self, sources: Sequence[_Source], folder: Path, say: Callable[[str], None]
    ) -> list[_Source]:
        """Limits the documents of the sources, in proportion to the size of their files."""
        assert self.max_examples is not None
        sizes = [sum(shard.size for shard, _ in source.shards) for source in sources]
        minimum = 1 if self.val_path else 2
        limited = []
        quotas = mixture.shared_out(self.max_examples, sizes)
        for source, quota in zip(sources, quotas, strict=True):
            max_documents, used = max(minimum, quota), list[tuple[Shard, Split | None]]()
            sides = sorted({side for _, side in source.shards}, key=str)
            for side in sides:
                of_side = [shard for shard, its_side in source.shards if its_side == side]
                count = vocabulary.first_shards(of_side, max_documents, folder, say)
                used += [(shard, side) for shard in of_side[:count]]
            limited.append(
                dataclasses.replace(source, shards=tuple(used), max_documents=max_documents)
            )
        return limited

    def _samples(self, sources: Sequence[_Source]) -> list[vocabulary.Sample]:
        """Returns the text that a tokenizer is trained on."""
        samples = list[vocabulary.Sample]()
        for source in sources:
            training = [(shard, side is None) for shard, side in source.shards if side != "val"]
            if training:
                # The tokens are not counted yet, so no more than this certainly trains.
                split = 1 - layout.LARGEST_HELD_OUT if training[0][1] else 1.0
                samples.append((training, layout.limit(split)))
        return samples

    def _held_out(
        self,
        sources: Sequence[_Source],
        cached_shards: Mapping[Shard, CachedShard],
        say: Callable[[str], None],
    ) -> float:
        """Returns the fraction of the documents that validates where no name says it."""
        count, size = 0.0, 0.0
        for source in sources:
            split = [cached_shards[shard] for shard, side in source.shards if side is None]
            of_source = sum(shard.count for shard in split)
            used = min(1.0, (source.max_documents or of_source) / max(1, of_source))
            count += used * of_source
            size += used * sum(shard.bytes for shard in split)
        share = layout.held_out(int(count), int(size), self.val_documents)
        if count:
            say(
                f"{100 * share:.3g}% of {count:,.0f} documents ({size / 1e6:,.1f} MB) validate, "
                "chosen by the hashes of their text; data.val_documents sets how many are enough"
            )
        return share

    def _corpus(
        self,
        source: _Source,
        cached_shards: Mapping[Shard, CachedShard],
        bad: Mapping[documents.File, BadExample],
        train_split: float,
    ) -> Corpus:
        """Returns the tokens of a source, without shards of files that are bad elsewhere.

        Raises:
            InputError: none of the files can be read.
        """
        if all(file in bad for file in source.files):
            first = source.files[0]
            raise InputError(
                f"{source.name}: none of the {len(source.files)} files can be read; the first is "
                f"{bad[first]}"
            )
        used = tuple(
            (cached_shards[shard], side)
            for shard, side in source.shards
            if len(shard.file_ranges) > 1 or shard.file_ranges[0].file not in bad
        )
        return Corpus(source.name, used, train_split, source.max_documents)


def _recipe(path: Path, lossless: bool) -> Recipe:
    """Returns what the tokens depend on, for a ``tokenizer.json``."""
    read = tokenizer_file.read(path)
    marks = specials.marks(read, path).before if lossless else (specials.find(read, str(path)).sep,)
    ids = 1 + max(read.get_vocab().values())
    content = path.read_text(encoding="utf-8")
    return Recipe(content, str(path), lossless, marks, ids)


def _report_skipped(cached_shards: Iterable[CachedShard], say: Callable[[str], None]) -> None:
    """Prints how many rows are not used, and the first that is bad in each of some files."""
    skipped, bad, first = Counter[str](), Counter[str](), dict[str, str]()
    for shard in cached_shards:
        skipped.update(shard.skipped)
        for name, (count, reason) in shard.bad_rows.items():
            bad[name] += count
            first.setdefault(name, reason)
    if skipped:
        names = splits.listed([*skipped])
        say(f"skipped: {skipped.total():,} rows without text, in {names}")
    for name in [*bad][:_LISTED]:
        say(f"skipped: {bad[name]:,} bad rows in {name}, such as {first[name]}")
    if len(bad) > _LISTED:
        more = bad.total() - sum(bad[name] for name in [*bad][:_LISTED])
        say(f"skipped: {more:,} bad rows in {len(bad) - _LISTED:,} more files")


def _bad(
    sources: Sequence[_Source], cached_shards: Mapping[Shard, CachedShard]
) -> dict[documents.File, BadExample]:
    """Returns the broken files; one that is divided is broken if any part is."""
    return {
        file_range.file: BadExample(
            file_range.file.path, cached_shards[shard].bad[file_range.file.name]
        )
        for source in sources
        for shard, _ in source.shards
        for file_range in shard.file_ranges
        if file_range.file.name in cached_shards[shard].bad
    }
