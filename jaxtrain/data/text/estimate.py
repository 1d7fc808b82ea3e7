"""Estimates what ``prepare tokens`` takes, from a sample of the files.

Workers read the sampled files, count the words at the beginning of each, and tokenize it. This
process merges the counts, trains a tokenizer on them, and packs the tokens, as it does with those
of all files.
"""

import dataclasses
import json
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import cache
from jaxtrain.data.engine import KILLS, Engine
from jaxtrain.data.estimate import SAMPLE, Estimate, MeasuredFile, Stopwatch, from_sample, spread
from jaxtrain.data.quarantine import too_many
from jaxtrain.data.text import (
    documents,
    encoding,
    hub_datasets,
    packing,
    specials,
    stdlib_corpus,
    tokenizer,
    tokenizer_file,
    tokens,
    vocabulary,
    word_counts,
)
from jaxtrain.data.text.documents import Fresh, Scanned
from jaxtrain.data.text.encoding import Chunk
from jaxtrain.data.text.sources import Text, with_held_out
from jaxtrain.data.text.specials import Form
from jaxtrain.data.text.splitting import TRAIN
from jaxtrain.errors import BadExample, InputError, first_line
from jaxtrain.storage.atomic import expanded
from jaxtrain.telemetry.progress_bar import Say

_CHARACTERS = 1 << 20  # of each sampled file that are tokenized
_MOST_BYTES = 2**31  # of the sampled files, which are read to their ends
_SPAN_BYTES = 16  # of a packed sequence


def estimate(data: Text, model: Any, *, engine: Engine, say: Say, most: int = SAMPLE) -> Estimate:
    """Estimates time and space from a sample; writes nothing to the cache.

    Args:
        data: the config of the data.
        model: that of the model; see :meth:`jaxtrain.data.text.config.Masked.open`.
        engine: processes the sample.
        say: prints a line on the console.
        most: files in the sample.

    Raises:
        InputError: no text, a dataset that is not fetched yet, or a tokenizer that does not fit.
    """
    data = data.with_tokenizer_of(model, _silent)
    folder = cache.path_of(data.cache_dir) / "text"
    with tempfile.TemporaryDirectory() as temporary:
        path = data.path or str(stdlib_corpus.prepare(Path(temporary), say) / "*.txt")
        bucket = cache.bucket_of(data.cache_dir)
        scans, fresh = _look_up(data, path, folder, say, bucket)
        files = [file for scan in scans for file in scan]
        # Any change of the files changes all tokens, so none are left to reuse.
        corpora = [] if fresh else with_held_out(data.corpora(scans, path, _silent), folder)
        content = _tokenizer(data, model.vocab_size, corpora, folder, bucket)
        left = _left(data, corpora, content, folder, bucket)
        if not left:
            refused = _refused(data, files, fresh, [])
            return dataclasses.replace(from_sample([], 0, 0), refused=refused)
        sample: list[Fresh | Scanned] = spread(fresh or files, _size, most)
        while len(sample) > 2 and sum(map(_size, sample)) > _MOST_BYTES:
            sample = spread(sample, _size, len(sample) // 2)
        kind = data.tokenizer_kind if content is None else None
        reading = engine.as_finished(_read, sample, data.text_field, kind, died=_died)
        tried = [one for _, one in reading]
        training = _Training()
        texts = [text for one in tried for text in one.texts]
        if content is None and texts:
            content = training.run(tried, model.vocab_size, data.tokenizer_kind)
        how = (content, data.form, model.vocab_size)
        tried = [
            one
            for _, one in engine.as_finished(_encode, tried, *how, died=lambda one: one.killed())
        ]
    size = sum(map(_size, fresh)) + sum(map(_size, files))
    sampled = max(1, sum(one.scanned.size for one in tried))
    used = _used(data, corpora, files, [one.scanned for one in tried], size / sampled)
    unread = sum(map(_size, fresh)) / max(1, size)
    # The text in use, in multiples of that of the sample.
    scale = used * size / sampled * sum(one.scanned.text_bytes for one in tried)
    scale /= max(1, sum(one.tried_bytes for one in tried))
    share = 1 if data.val_path else data.train_split
    times = training.times(scale, share)
    # The fractions of it that are read and counted to train a tokenizer.
    read, counted = (share, times / scale) if times else (0, 0)
    measured = [
        MeasuredFile(
            size=one.scanned.size,
            seconds=one.scan_s * unread
            + (one.text_s * left + one.read_s * read + one.count_s * counted) * one.rest * used,
            written=(one.ids.nbytes + one.ends.nbytes) * one.rest * used * left,
            dropped=one.dropped,
        )
        for one in tried
    ]
    found = from_sample(measured, math.ceil((len(fresh) + len(files)) * left), size)
    serial, spans = training.seconds(times), 0
    if data.form == "sentences" and texts:
        pack_s, spans = _pack(tried, model.sequence_length)
        serial += pack_s * scale
    records = len(fresh) / len(tried) * sum(len(one.record) for one in tried)
    return dataclasses.replace(
        found,
        serial=serial,
        in_bytes=round(size * left),
        out_bytes=found.out_bytes + spans * scale * _SPAN_BYTES + records,
        refused=_refused(data, files, fresh, [one.scanned for one in tried]),
    )


def _refused(
    data: Text, files: Sequence[Scanned], fresh: Sequence[Fresh], sample: Sequence[Scanned]
) -> str | None:
    """Returns why the command would refuse the files; None if it would not, by the sample."""
    count = len(files) + len(fresh)
    bad = sum(file.reason is not None for file in files)
    about = ""
    if fresh:
        found = sum(file.reason is not None for file in sample)
        bad += round(len(fresh) * found / len(sample))
        about = "about " if len(sample) < len(fresh) else ""
    complaint = too_many(bad, count, data.max_bad_share)
    return complaint and f"{about}{complaint}: fix or remove them, or raise --data.max_bad_share"


def _silent(line: str) -> None:
    pass


def _size(file: Fresh | Scanned) -> int:
    return file.size if isinstance(file, Scanned) else file[3]


def _look_up(
    data: Text, path: str, folder: Path, say: Say, bucket: cache.CacheBucket | None
) -> tuple[list[list[Scanned]], list[Fresh]]:
    """Returns the files of each input that were scanned before, and all others."""
    scans, fresh = [], []
    for flag, one in data.inputs(path):
        if hub_datasets.is_named(one):
            raise InputError(
                f"{flag} {one}: only files can be estimated: pass a folder with the files of the "
                "dataset, or omit --dry-run and measure with --data.max_examples 10k"
            )
        _, known, missing = documents.look_up(one, data.text_field, folder, flag, say, bucket)
        scans.append([file for file in known if file is not None])
        fresh += missing
    return scans, fresh


def _tokenizer(
    data: Text,
    vocab_size: int,
    corpora: Sequence[tokens.Corpus],
    folder: Path,
    bucket: cache.CacheBucket | None,
) -> bytes | None:
    """Returns the ``tokenizer.json``; None if it must be trained."""
    if data.tokenizer is not None:
        path = expanded(data.tokenizer)
        tokenizer.load(path, vocab_size, data.form)
        return path.read_bytes()
    if corpora:
        target = vocabulary.cache_folder(corpora, vocab_size, data.tokenizer_kind, folder)
        if cache.read_manifest(target) is not None:
            return (target / tokenizer.NAME).read_bytes()
        if bucket is not None and cache.in_bucket(target, bucket):
            found = bucket.output.bucket.get(f"{bucket.name(target)}/{tokenizer.NAME}")
            return None if found is None else found.data
    return None


def _left(
    data: Text,
    corpora: Sequence[tokens.Corpus],
    content: bytes | None,
    folder: Path,
    bucket: cache.CacheBucket | None,
) -> float:
    """Returns the fraction of the text that is not tokenized yet."""
    if not corpora or content is None:
        return 1.0
    marks: tuple[int, ...] = (specials.MARK,)
    if data.tokenizer is not None:
        marks = tokens.marks_of(expanded(data.tokenizer), data.form)
    left = 0.0
    for corpus in corpora:
        target = tokens.cache_folder(corpus, content, data.form, marks, folder)
        left_mb = tokens.left_mb(corpus, target)
        left += left_mb if left_mb and not cache.in_bucket(target, bucket) else 0.0
    return left / sum(corpus.megabytes() for corpus in corpora)


def _used(
    data: Text,
    corpora: Sequence[tokens.Corpus],
    files: Sequence[Scanned],
    sample: Sequence[Scanned],
    scale: float,
) -> float:
    """Returns the fraction of the text that ``data.max_examples`` selects."""
    if corpora:
        text_mb = sum(file.text_bytes for file in files) / 1e6
        return sum(corpus.megabytes() for corpus in corpora) / text_mb
    if data.max_examples is None:
        return 1.0
    return min(1.0, data.max_examples / max(1, scale * sum(one.documents for one in sample)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tried:
    """A file of the sample.

    Attributes:
        scanned: its scan.
        scan_s: seconds that the scan took; 0 if it was scanned before.
        texts: its first documents.
        read_s: seconds to read them.
        text_s: seconds to read and tokenize them.
        counts: their words, if a tokenizer is trained on them.
        count_s: seconds to count them.
        ids, ends: their tokens; see :class:`jaxtrain.data.text.encoding.Part`.
    """

    scanned: Scanned
    scan_s: float
    texts: tuple[str, ...] = ()
    read_s: float = 0.0
    text_s: float = 0.0
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    count_s: float = 0.0
    ids: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.uint16))
    ends: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.uint64))

    @property
    def tried_bytes(self) -> int:
        """Returns the size of the documents."""
        return sum(len(text.encode()) for text in self.texts)

    @property
    def rest(self) -> float:
        """Returns the text of the file in multiples of these documents."""
        return self.scanned.text_bytes / max(1, self.tried_bytes)

    @property
    def dropped(self) -> BadExample | None:
        """Returns why the file is not used."""
        reason = self.scanned.reason
        return None if reason is None else BadExample(self.scanned.path, reason)

    @property
    def record(self) -> str:
        """Returns what the record of scans has about the file."""
        return json.dumps(dataclasses.asdict(self.scanned))

    def failed(self, reason: str) -> "_Tried":
        """Returns this for a file that cannot be used after all."""
        scanned = dataclasses.replace(self.scanned, reason=reason, documents=0, text_bytes=0)
        return _Tried(scanned=scanned, scan_s=self.scan_s)

    def killed(self) -> "_Tried":
        """Returns this for a file that kills its worker."""
        return self.failed(KILLS)


def _read(file: Fresh | Scanned, text_field: str | None, kind: tokenizer.Kind | None) -> _Tried:
    """Scans a file, reads its first documents, and counts their words; runs in a worker.

    Args:
        file: the file.
        text_field: see :func:`jaxtrain.data.text.documents.read`.
        kind: of the tokenizer to train; None counts nothing.
    """
    watch, scan_s = Stopwatch(), 0.0
    if isinstance(file, Scanned):
        scanned = file
    else:
        scanned = documents.scan_file(file, text_field)
        scan_s = watch.seconds()
    watch, texts, characters = Stopwatch(), [], 0
    try:
        with scanned.opened() as path:
            for text in documents.read(path, text_field) if scanned.documents else ():
                texts.append(text)
                characters += len(text)
                if characters >= _CHARACTERS:
                    break
    except (BadExample, OSError) as error:  # it has changed since it was scanned
        return _Tried(scanned=scanned, scan_s=scan_s).failed(first_line(error))
    read_s, watch = watch.seconds(), Stopwatch()
    return _Tried(
        scanned=scanned,
        scan_s=scan_s,
        texts=tuple(texts),
        read_s=read_s,
        text_s=read_s,
        counts=tokenizer.count(texts, kind) if kind is not None else Counter(),
        count_s=watch.seconds(),
    )


def _died(file: Fresh | Scanned) -> _Tried:
    scanned = file if isinstance(file, Scanned) else documents.bad(file[1:], KILLS)
    return _Tried(scanned=scanned, scan_s=0.0).killed()


def _encode(tried: _Tried, content: bytes | None, form: Form, vocab_size: int) -> _Tried:
    """Tokenizes the first documents of a file; runs in a worker."""
    if content is None or not tried.texts:
        return tried
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, tokenizer.NAME)
        path.write_bytes(content)
        read = tokenizer_file.read(path)
        # Which special token is before documents has no effect on the estimate.
        marks = (0,) if form == "exact" else (specials.find(read, str(path)).sep,)
        # One that was trained on the sample has fewer ids than one that is trained on all text.
        size = max(vocab_size, 1 + max(read.get_vocab().values()))
        dtype = "uint16" if size <= 2**16 else "uint32"
        how = (str(path), dtype, form, marks)
        encoding.encode(Chunk([], 0), *how)  # reads the tokenizer
        watch = Stopwatch()
        _, parts = encoding.encode(Chunk([(TRAIN, text) for text in tried.texts], 0), *how)
    found = parts[TRAIN]
    return dataclasses.replace(
        tried,
        text_s=tried.text_s + watch.seconds(),
        ids=np.frombuffer(found.ids, dtype),
        ends=found.ends,
    )


class _Training:
    """Trains a tokenizer on the sample."""

    def __init__(self) -> None:
        self._characters = 0
        self._merge_s = self._learn_s = 0.0

    def run(self, tried: Sequence[_Tried], vocab_size: int, kind: tokenizer.Kind) -> bytes:
        """Returns the ``tokenizer.json``."""
        watch = Stopwatch()
        words = word_counts.merge(one.counts for one in tried)
        self._merge_s, watch = watch.seconds(), Stopwatch()
        trained = tokenizer.train_on(words, vocab_size, kind)
        self._learn_s = watch.seconds()
        self._characters = sum(len(text) for one in tried for text in one.texts)
        content: str = trained.to_str()
        return content.encode()

    def times(self, scale: float, share: float) -> float:
        """Returns how much text is counted, in multiples of the sample.

        Args:
            scale: all text in multiples of the sample.
            share: fraction of it that is for training.
        """
        if not self._characters:
            return 0.0
        return min(scale * share, vocabulary.MOST_CHARACTERS / self._characters)

    def seconds(self, times: float) -> float:
        """Returns what training takes on that much text, once it is counted."""
        # Heaps' law: the distinct words, which are merged, grow with the square root of the text.
        return self._merge_s * times + self._learn_s * math.sqrt(max(1.0, times))


def _pack(tried: Sequence[_Tried], sequence_length: int) -> tuple[float, int]:
    """Packs the tokens of the sample; returns seconds, and the number of sequences."""
    starts = np.cumsum([0, *(len(one.ids) for one in tried)])
    ids = np.concatenate([one.ids for one in tried])
    ends = np.concatenate(
        [one.ends + np.uint64(start) for one, start in zip(tried, starts, strict=False)]
    )
    if not len(ids):
        return 0.0, 0
    watch, sep = Stopwatch(), int(ids[-1])  # a document ends with [SEP]
    spans = sum(map(len, packing.span_blocks(ids, ends, sequence_length, sep)))
    return watch.seconds(), spans
