"""What ``prepare tokens --dry-run`` estimates, compared with what preparing takes."""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import engine_threads
import pytest
import small_text
from obstore.store import MemoryStore
from small_text import Model, silent

from jaxtrain.data import engine
from jaxtrain.data import estimate as of_sample
from jaxtrain.data.text import (
    Causal,
    Masked,
    documents,
    encoding,
    estimate,
    packing,
    tokenizer,
    tokens,
    vocabulary,
)
from jaxtrain.data.text.sources import Text
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import bucket, bucket_output

MODEL = Model(vocab_size=400)


@pytest.fixture(autouse=True)
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_pool", engine_threads.pool)


def masked(folder: Path | str, tmp_path: Path, **fields: object) -> Masked:
    cache = str(tmp_path / "cache")
    return Masked(path=str(folder), batch_size=2, cache_dir=cache, **fields)  # type: ignore[arg-type]


def estimated(data: Text, model: Model = MODEL, most: int = 16) -> of_sample.Estimate:
    return estimate.estimate(data, model, engine=engine.Local(1), say=silent, most=most)


def written(tmp_path: Path) -> dict[Path, int]:
    """The files of the cache except the trained tokenizer, which does not grow with the text."""
    return {
        path: path.stat().st_size
        for path in (tmp_path / "cache").rglob("*")
        if path.is_file() and path.name not in ("tokenizer.json", "manifest.json", "progress.json")
    }


@pytest.fixture(params=[Masked, Causal])
def kind(request: pytest.FixtureRequest) -> type[Text]:
    return request.param  # type: ignore[no-any-return]


class Clock:
    """A clock that only work moves, in proportion to its input."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now, self._patch = 0.0, monkeypatch
        for name in ("monotonic", "process_time"):
            monkeypatch.setattr(time, name, self.seconds)

    def seconds(self) -> float:
        return self._now

    def each_call(self, module: ModuleType, name: str, price: Callable[..., float]) -> None:
        """Lets a function take ``price(*arguments)`` seconds."""
        real = getattr(module, name)

        def call(*arguments: Any) -> Any:
            self._now += price(*arguments)
            return real(*arguments)

        self._patch.setattr(module, name, call)

    def each_item(self, module: ModuleType, name: str, price: Callable[[Any], float]) -> None:
        """Lets each item that a function yields take ``price(item)`` seconds."""
        real = getattr(module, name)

        def items(*arguments: Any) -> Iterator[Any]:
            for item in real(*arguments):
                self._now += price(item)
                yield item

        self._patch.setattr(module, name, items)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Each kind of work takes a tenth of the time or more."""
    made = Clock(monkeypatch)
    made.each_item(documents, "read", len)
    made.each_call(encoding, "encode", lambda chunk, *_: 3 * sum(len(x) for _, x in chunk.texts))
    made.each_call(tokenizer, "count", lambda texts, kind: 2 * sum(map(len, texts)))
    made.each_call(tokenizer, "train_on", lambda words, *_: 2000 * len(words))
    made.each_item(packing, "span_blocks", lambda spans: 50 * len(spans))
    return made


@pytest.mark.parametrize(("most", "error"), [(256_000_000, 0.02), (200_000, 0.2)])
def test_an_estimate_is_close_to_what_preparing_takes(
    kind: type[Text],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    most: int,
    error: float,
) -> None:
    """Of each file in the sample, only a part is tokenized; all or a tenth of the text is counted.

    Files without any of that tenth are not read again, which the estimate does not know.
    """
    monkeypatch.setattr(vocabulary, "MOST_CHARACTERS", most)
    monkeypatch.setattr(estimate, "_CHARACTERS", 20_000)
    folder = small_text.write(tmp_path / "in", 2)
    sentences = (folder / "0.txt").read_text().splitlines()
    for number in range(60):
        words = random.Random(number).choices(sentences, k=900)
        (folder / f"{number}.txt").write_text("\n".join(words))
    data = kind(path=str(folder), batch_size=2, cache_dir=str(tmp_path / "cache"))
    found = estimated(data, most=6)
    assert not written(tmp_path)
    assert (found.files, found.sampled, found.dropped) == (60, 6, ())
    began = clock.seconds()
    data.open(MODEL, seed=0, say=silent)
    took = clock.seconds() - began
    assert found.seconds + found.serial == pytest.approx(took, rel=error)
    assert found.out_bytes == pytest.approx(sum(written(tmp_path).values()), rel=0.2)
    assert found.in_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert estimated(data).files == 0


def test_what_another_machine_uploaded_is_not_left(
    kind: type[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the record of files is fetched."""
    made = bucket.Bucket("s3://bucket/cache", MemoryStore())
    monkeypatch.setattr(bucket_output, "opened", lambda url: made)
    folder = small_text.write(tmp_path / "in", 2)
    data = kind(path=str(folder), batch_size=2, cache_dir="s3://bucket/cache")
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "one"))
    data.open(MODEL, seed=0, say=silent, uploads=True)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "two"))
    assert estimated(data).files == 0
    assert len([path for path in (tmp_path / "two").rglob("*") if path.is_file()]) == 1
    (tokenized,) = (name for name in made.sizes() if name.endswith("/val.tokens"))
    made.delete([tokenized])
    assert estimated(data).files > 0


def test_one_file(tmp_path: Path) -> None:
    folder = small_text.write(tmp_path / "in", 1)
    (path,) = folder.iterdir()
    path.write_text(path.read_text() * 20)
    found = estimated(masked(path, tmp_path))
    assert (found.files, found.sampled, found.error) == (1, 1, None)
    assert found.seconds > 0
    assert found.out_bytes > 1000


def test_a_broken_file_in_the_sample_is_named(tmp_path: Path) -> None:
    folder = small_text.write(tmp_path / "in")
    (folder / "broken.txt").write_bytes(b"\xff\xfe" * 2000)
    found = estimated(masked(folder, tmp_path))
    (dropped,) = found.dropped
    assert dropped.path.endswith("broken.txt")
    assert "UTF-8" in dropped.reason
    for path in folder.iterdir():
        path.write_bytes(b"\xff\xfe")
    found = estimated(masked(folder, tmp_path))
    assert (len(found.dropped), found.serial) == (7, 0)


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(InputError, match=r"in is empty \(hidden files are not read\): add .txt, "):
        estimated(masked(tmp_path / "in", tmp_path))


def test_only_what_is_left_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between two chunks leaves some of the text tokenized, and all of it scanned."""
    data = masked(small_text.write(tmp_path / "in", 12), tmp_path)
    before = estimated(data)
    monkeypatch.setattr(tokens, "_PIECE_CHARACTERS", 1000)
    monkeypatch.setattr(tokens, "_KEEP_EVERY_S", 0.0)
    keep, kept = tokens._Streams.keep, []

    def killed(streams: tokens._Streams) -> None:
        keep(streams)
        kept.append(streams.megabytes())
        if len(kept) == 6:
            raise RunAgain("killed")

    monkeypatch.setattr(tokens._Streams, "keep", killed)
    with pytest.raises(RunAgain):
        data.open(MODEL, seed=0, say=silent)
    monkeypatch.setattr(tokens._Streams, "keep", keep)
    there = written(tmp_path)
    found = estimated(data)
    assert written(tmp_path) == there
    total = sum(path.stat().st_size for path in (tmp_path / "in").iterdir())
    left = 1 - kept[-1] * 1e6 / total
    assert 0.1 < left < 0.9
    assert found.in_bytes == pytest.approx(left * total, rel=0.05)
    # All of the packing index is left, and nothing of the record of scans.
    assert found.out_bytes / before.out_bytes == pytest.approx(left, rel=0.2)


def test_limited_documents_and_a_given_tokenizer(tmp_path: Path) -> None:
    folder = small_text.write(tmp_path / "in", 8)
    all_of_it = estimated(masked(folder, tmp_path))
    few = estimated(masked(folder, tmp_path, max_examples=2))
    assert few.out_bytes < all_of_it.out_bytes / 2
    data = masked(folder, tmp_path)
    data.open(MODEL, seed=0, say=silent)
    (words,) = (tmp_path / "cache/text").glob("vocabulary-*/tokenizer.json")
    shutil.copy(words, tmp_path / "words.json")
    shutil.rmtree(tmp_path / "cache")
    given = estimated(masked(folder, tmp_path, tokenizer=str(tmp_path / "words.json")))
    assert given.serial < all_of_it.serial
    with pytest.raises(InputError, match="only files can be estimated"):
        estimated(masked("hf:some/dataset", tmp_path))
