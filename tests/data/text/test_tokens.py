import contextlib
import errno
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_threads
import numpy as np
import pytest
import tokenizers

from jaxtrain.data import engine, splits
from jaxtrain.data.text import config as text_config
from jaxtrain.data.text import documents, encoding, tokens, vocabulary
from jaxtrain.data.text.specials import SEP, Form
from jaxtrain.data.text.splitting import TRAIN, VAL, of_sides
from jaxtrain.data.text.tokens import Corpus
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage import shared_folder
from jaxtrain.telemetry import progress_bar


def silent(text: str) -> None:
    pass


def text(seed: int, sentences: int = 30) -> str:
    """Sentences of made-up words and names of special tokens."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("aeinorst", k=rng.randint(1, 8))) for _ in range(60)]
    words += ["[SEP]", "[PAD]", "Ünicode", "3.14"]
    return " ".join(
        "It " + " ".join(rng.choices(words, k=rng.randint(1, 12))) + "." for _ in range(sentences)
    )


def make(folder: Path, files: int = 4) -> Path:
    folder.mkdir()
    for number in range(files):
        rows = [json.dumps({"text": text(10 * number + row)}) for row in range(5)]
        (folder / f"{number}.jsonl").write_text("\n".join(rows))
    return folder


def corpus(folder: Path, cache: Path, train_split: float = 0.7) -> Corpus:
    cache.mkdir(exist_ok=True)
    files = documents.scan(str(folder), None, cache, "--data.path", silent)
    counts = [file.documents for file in files]
    trains = splits.by_hash([file.name for file in files], counts, train_split)
    split = of_sides(counts, [TRAIN if here else VAL for here in trains], None)
    return Corpus(files=files, split=split, text_field=None)


def trained(
    what: Corpus, cache: Path, size: int = 120, say: Callable[[str], None] = silent
) -> Path:
    return vocabulary.prepare(
        [what], vocab_size=size, kind="wordpiece", given=None, folder=cache, say=say
    )


def prepare(
    what: Corpus, cache: Path, say: Callable[[str], None] = silent, processes: int = 1
) -> tuple[Path, dict]:
    words = trained(what, cache, say=say)
    return tokens.prepare(what, tokenizer_path=words, folder=cache, say=say, processes=processes)


def test_the_streams_hold_every_document_once(tmp_path: Path) -> None:
    what = corpus(make(tmp_path / "in"), tmp_path / "cache")
    folder, manifest = prepare(what, tmp_path / "cache")
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words.encode_special_tokens = True
    for split, name in ((TRAIN, "train"), (VAL, "val")):
        wanted: list[int] = []
        ends = []
        mine = [document for _, side, document in what.read() if side == split]
        for document in mine:
            for sentence in encoding.sentences(document):
                wanted += words.encode(sentence, add_special_tokens=False).ids
                ends.append(len(wanted))
            wanted.append(SEP)
        assert manifest["dtype"] == "uint16"
        got = np.fromfile(folder / f"{name}.tokens", np.uint16)
        assert got.tolist() == wanted
        # A "[SEP]" in the text is ordinary text.
        assert (got == SEP).sum() == len(mine) == manifest["splits"][name]["documents"] > 0
        assert np.fromfile(folder / f"{name}.ends", np.uint64).tolist() == ends
        facts = manifest["splits"][name]
        assert (facts["tokens"], facts["sentences"]) == (len(wanted), len(ends))
        assert facts["bytes"] == sum(len(document.encode()) for document in mine)


def test_pieces_and_processes_do_not_change_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = corpus(make(tmp_path / "in"), tmp_path / "one")
    one, facts = prepare(what, tmp_path / "one")
    monkeypatch.setattr(tokens, "_PIECE_CHARACTERS", 100)
    for processes in (1, 2):
        other = tmp_path / f"other-{processes}"
        other.mkdir()
        two, same_facts = prepare(what, other, processes=processes)
        assert facts["splits"] == same_facts["splits"]
        for name in ("train.tokens", "train.ends", "val.tokens", "val.ends", "tokenizer.json"):
            assert (one / name).read_bytes() == (two / name).read_bytes(), name


class _Backwards:
    """An engine that finishes the last item first, and one of two items twice."""

    where = "backwards"

    def as_finished(self, work: Any, items: Any, *fixed: Any, died: Any) -> Iterator[Any]:
        assert b"0.jsonl" not in pickle.dumps(fixed)  # a worker receives only its own files
        for number, item in enumerate(reversed(list(items))):
            result = work(item, *fixed)
            if number % 2:
                result = work(item, *fixed)
            yield item, result


@pytest.mark.parametrize("form", ["sentences", "exact"])
@pytest.mark.parametrize("most", [None, 13])
def test_an_engine_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form, most: int | None
) -> None:
    """By files, in any order, with a sample of the text, and with documents skipped."""
    monkeypatch.setattr(vocabulary, "MOST_CHARACTERS", 12_000)
    monkeypatch.setattr(engine, "_pool", engine_threads.pool)
    folder = make(tmp_path / "in", files=6)
    (folder / "3.jsonl").write_text('{"text": "One document only."}')
    model = text_config.Masked if form == "sentences" else text_config.Causal
    found = {}
    for name, where in (("alone", None), ("local", engine.Local(2)), ("backwards", _Backwards())):
        config = model(
            path=str(folder), batch_size=1, cache_dir=str(tmp_path / name), max_examples=most
        )
        (tmp_path / name).mkdir()
        prepared = config.prepare(300, form, silent, where)
        cache = prepared.caches[0][0]
        found[name] = {
            path.name: path.read_bytes()
            for path in cache.iterdir()
            if path.suffix in (".tokens", ".ends") or path.name in ("tokenizer.json", "token_bytes")
        }
        assert not (cache / "parts").exists()
        assert prepared.total("train", "tokens") > 1000
    assert found["alone"] == found["local"] == found["backwards"]
    assert len(found["alone"]) >= 5


def test_a_killed_command_with_an_engine_resumes(tmp_path: Path) -> None:
    what = corpus(make(tmp_path / "in"), tmp_path / "cache")
    words = trained(what, tmp_path / "cache")
    alone, _ = prepare(what, tmp_path / "cache")
    done: list[Any] = []

    class Dies(_Backwards):
        def as_finished(self, work: Any, items: Any, *fixed: Any, died: Any) -> Iterator[Any]:
            for item in (items[2], items[0], items[1]):
                done.append(item)
                yield item, work(item, *fixed)
            raise KeyboardInterrupt

    class Resumes(_Backwards):
        def as_finished(self, work: Any, items: Any, *fixed: Any, died: Any) -> Iterator[Any]:
            done.append(list(items))
            yield from super().as_finished(work, items, *fixed, died=died)

    shutil.rmtree(alone)
    before = prepare(what, tmp_path / "cache")[0]
    expected = {path.name: path.read_bytes() for path in before.glob("*.*s")}
    shutil.rmtree(before)
    where = {"tokenizer_path": words, "folder": tmp_path / "cache", "say": silent}
    with pytest.raises(KeyboardInterrupt):
        tokens.prepare(what, **where, engine=Dies())
    (work,) = (tmp_path / "cache").glob("tokens-*.building")
    (work / ".progress.json.abcd1234.json").write_text("of a killed command")
    folder, _ = tokens.prepare(what, **where, engine=Resumes())
    assert not list(folder.glob(".*"))
    assert [item[:2] for item in done[-1]] == [(3, 0)]  # only the file that was not tokenized
    assert {path.name: path.read_bytes() for path in folder.glob("*.*s")} == expected


def test_parts_that_this_host_sees_late_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, whose client remembers for a while that a file did not exist.

    It also keeps a removed file under another name while the file is mapped, so that the folder
    cannot be removed.
    """
    mapped: list[bool] = []
    remove = shutil.rmtree

    def rmtree(path: Path, **more: Any) -> None:
        mapped.append(f"{path}/" in Path("/proc/self/maps").read_text())
        remove(path, **more)

    class Late(_Backwards):
        def as_finished(self, work: Any, items: Any, *fixed: Any, died: Any) -> Iterator[Any]:
            for item, result in super().as_finished(work, items, *fixed, died=died):
                if item[0] == 1:
                    part = tokens._part(fixed[1], item[0], item[1])
                    away = part.rename(part.with_name(".away"))
                    threading.Timer(0.2, os.rename, [away, part]).start()
                yield item, result

    what = corpus(make(tmp_path / "in"), tmp_path / "cache")
    words = trained(what, tmp_path / "cache")
    alone, facts = prepare(what, tmp_path / "cache")
    expected = {path.name: path.read_bytes() for path in alone.glob("*.*s")}
    shutil.rmtree(alone)
    monkeypatch.setattr(shared_folder, "_POLL_S", 0.01)
    monkeypatch.setattr(tokens, "_KEEP_EVERY_S", 0.0)
    monkeypatch.setattr(tokens.shutil, "rmtree", rmtree)
    where = {"tokenizer_path": words, "folder": tmp_path / "cache", "say": silent}
    folder, found = tokens.prepare(what, **where, engine=Late())
    assert found["splits"] == facts["splits"]
    assert {path.name: path.read_bytes() for path in folder.glob("*.*s")} == expected
    assert len(mapped) >= 8  # the working folders and the parts of four files, and more
    assert not any(mapped)


def test_the_error_about_a_killed_worker_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kills(_Backwards):
        def as_finished(self, work: Any, items: Any, *fixed: Any, died: Any) -> Iterator[Any]:
            died(list(items)[1])
            yield

    folder = make(tmp_path / "in")
    what = corpus(folder, tmp_path / "cache")
    killed = rf"^a worker that reads {what.files[1].path} was killed, also in every retry, most"
    words = trained(what, tmp_path / "cache")
    with pytest.raises(RunAgain, match=killed):
        tokens.prepare(
            what, tokenizer_path=words, folder=tmp_path / "cache", say=silent, engine=Kills()
        )


def test_the_vocabulary_comes_from_the_training_split(tmp_path: Path) -> None:
    folder = make(tmp_path / "in")
    what = corpus(folder, tmp_path / "cache")
    for file, side in zip(what.files, what.split.sides or (), strict=True):
        if side == VAL:
            Path(file.path).write_text(json.dumps({"text": "яблоко яблоко яблоко"}))
    folder, _ = prepare(corpus(folder, tmp_path / "cache"), tmp_path / "cache")
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert words.encode("яблоко").tokens == ["[CLS]", "[UNK]", "[SEP]"]


@pytest.mark.parametrize("separate", [True, False])
def test_a_trained_tokenizer_does_not_depend_on_validation_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separate: bool
) -> None:
    """Of a path of its own, or of the files that the split chose; also where text is sampled."""
    monkeypatch.setattr(vocabulary, "MOST_CHARACTERS", 12_000)  # of about 40,000
    folder = make(tmp_path / "in", files=6)
    (tmp_path / "val").mkdir()
    split = corpus(folder, tmp_path / "scans", train_split=0.9).split
    at = (split.sides or ()).index(VAL)
    changing = tmp_path / "val/text.txt" if separate else folder / f"{at}.jsonl"
    trained = set()
    for cache, sentences in (("one", 1), ("two", 3000)):
        changing.write_text(json.dumps({"text": text(99, sentences)}))
        config = text_config.Masked(
            path=str(folder),
            val_path=str(tmp_path / "val") if separate else None,
            batch_size=1,
            cache_dir=str(tmp_path / cache),
        )
        (tmp_path / cache).mkdir()
        config.prepare(300, "sentences", silent)
        (path,) = (tmp_path / cache).glob("text/vocabulary-*/tokenizer.json")
        trained.add((path.parent.name, path.read_bytes()))
    assert len(trained) == 1


def test_a_cache_is_reused_until_the_text_changes(tmp_path: Path) -> None:
    source, cache = make(tmp_path / "in"), tmp_path / "cache"
    said: list[str] = []

    def built(where: Path = source) -> tuple[bool, Path]:
        said.clear()
        folder, _ = prepare(corpus(where, cache), cache, said.append)
        return bool(said), folder

    first = built()
    assert first[0]
    assert built() == (False, first[1])
    os.utime(source / "1.jsonl", ns=(1, 1))  # scanned again, found equal
    assert built() == (False, first[1])
    shutil.copytree(source, tmp_path / "copy")  # the path does not matter
    assert built(tmp_path / "copy") == (False, first[1])
    rows = (source / "1.jsonl").read_text()
    (source / "1.jsonl").write_text(rows.replace("a", "o", 1))
    changed = built()
    assert changed[0]
    assert changed[1] != first[1]
    (source / "9.jsonl").write_text(rows)
    added = built()
    assert added[0]
    (source / "9.jsonl").unlink()
    assert built() == (False, changed[1])


def test_other_settings_use_other_caches(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    what = corpus(make(tmp_path / "in"), cache)
    first, _ = prepare(what, cache)
    small = trained(what, cache, 90)
    given = vocabulary.prepare(
        [what], vocab_size=90, kind="wordpiece", given=small, folder=cache, say=silent
    )
    assert given == small
    other, manifest = tokens.prepare(what, tokenizer_path=small, folder=cache, say=silent)
    split, _ = prepare(corpus(tmp_path / "in", cache, 0.3), cache)
    assert len({first, other, split}) == 3
    assert manifest["vocabulary"] == 90
    assert len({trained(what, cache), small}) == 2


DYING = """
import os, pickle, sys
from jaxtrain.data.text import tokens
what, cache, words, processes = pickle.load(sys.stdin.buffer)
tokens._PIECE_CHARACTERS, tokens._KEEP_EVERY_S = 500, 0.0
keep, calls = tokens._Streams.keep, []
def dying(self):
    keep(self)
    calls.append(1)
    if len(calls) == 5:
        for pair in self._files:
            for file in pair:
                file.write(b"torn")
                file.flush()
        os.kill(os.getpid(), 9)
tokens._Streams.keep = dying
if __name__ == "__main__":
    tokens.prepare(what, tokenizer_path=words, folder=cache, say=print, processes=processes)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_kill_while_tokenizing_loses_little_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    cache = tmp_path / "cache"
    what = corpus(make(tmp_path / "in"), cache)
    expected, facts = prepare(what, tmp_path)
    words = trained(what, cache)
    died = run_python(DYING, what, cache, words, processes)
    assert died.wait() == -9
    (left,) = cache.glob("tokens-*.building")
    progress = json.loads((left / "progress.json").read_text())
    assert 0 < progress["documents"] < sum(what.split.totals)
    before = progress["facts"][TRAIN]["tokens"] * 2
    assert (left / "train.tokens").stat().st_size == before + len(b"torn")

    encoded: list[str] = []
    encode = encoding.encode

    def counting(chunk: encoding.Chunk, *fixed: object) -> object:
        encoded.extend(text for _, text in chunk.texts)
        return encode(chunk, *fixed)  # type: ignore[arg-type]

    monkeypatch.setattr(encoding, "encode", counting)
    said: list[str] = []
    folder, manifest = prepare(what, cache, said.append)
    assert any("MB of text are already tokenized" in line for line in said)
    # Finished work is not repeated.
    every = [text for _, _, text in what.read()]
    assert encoded == every[progress["documents"] :]
    assert manifest["splits"] == facts["splits"]
    for name in ("train.tokens", "train.ends", "val.tokens", "val.ends"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    assert not list(cache.glob("*.building")) + list(cache.glob("*.tmp-*"))


def test_a_truncated_cache_is_rebuilt(tmp_path: Path) -> None:
    what = corpus(make(tmp_path / "in"), tmp_path / "cache")
    folder, _ = prepare(what, tmp_path / "cache")
    os.truncate(folder / "train.tokens", 100)
    _, manifest = prepare(what, tmp_path / "cache")
    assert (folder / "train.tokens").stat().st_size == manifest["files"]["train.tokens"] > 100


def test_worker_processes_end_with_their_parent(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from jaxtrain.data import worker_pool\n"
        "def work(item):\n"
        "    open(f'{item}-{os.getpid()}', 'w').close()\n"
        "    time.sleep(60 if item else 0)\n"
        "if __name__ == '__main__':\n"
        "    for _ in worker_pool.in_order(work, range(4), processes=2):\n"
        "        os.kill(os.getpid(), 9)\n"
    )
    (tmp_path / "program.py").write_text(program)
    died = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert died.returncode == -9
    pids = {int(path.name.split("-")[1]) for path in tmp_path.glob("[0-9]-*")}
    assert pids
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_two_processes_can_build_one_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    what = corpus(make(tmp_path / "in"), cache)
    program = (
        "import pickle, sys\n"
        "from jaxtrain.data.text import tokens\n"
        "what, cache, words = pickle.load(sys.stdin.buffer)\n"
        "folder, manifest = tokens.prepare(\n"
        "    what, tokenizer_path=words, folder=cache, say=lambda text: None)\n"
        "data = (folder / 'train.tokens').stat().st_size\n"
        "assert data == manifest['files']['train.tokens'], data\n"
    )
    words = trained(what, cache)
    both = [run_python(program, what, cache, words) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len([path for path in cache.glob("tokens-*") if path.is_dir()]) == 1
    assert not list(cache.glob("*.tmp-*"))


def run_python(program: str, *values: object) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    with process.stdin as stream:
        pickle.dump(values, stream)
    return process


def test_a_file_that_changes_meanwhile_stops_the_build(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    what = corpus(make(tmp_path / "in"), cache)
    path = tmp_path / "in" / "2.jsonl"
    for new in (path.read_text() + "\n" + json.dumps({"text": "more"}), "{broken", None):
        if new is None:
            path.unlink()
        else:
            path.write_text(new)
        with pytest.raises(InputError, match=r"2.jsonl changed while it was being read"):
            prepare(what, cache)
    assert not [p for p in cache.glob("tokens-*") if p.is_dir()]


@pytest.mark.parametrize("moment", ["reading", "looking"])
def test_finished_work_survives_an_unavailable_disk(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    what = corpus(make(tmp_path / "in"), cache)
    words = trained(what, cache)
    away = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    read, unchanged = documents.read, documents.Scanned.unchanged

    def reading(path: Path, text_field: str | None) -> Iterator[str]:
        for number, document in enumerate(read(path, text_field)):
            if moment == "reading" and path.name == "2.jsonl" and number == 2:
                raise away
            yield document

    def looking(file: documents.Scanned) -> bool:
        if moment == "looking" and file.name == "2.jsonl":
            raise away
        return unchanged(file)

    monkeypatch.setattr(tokens, "_PIECE_CHARACTERS", 500)
    monkeypatch.setattr(tokens, "_KEEP_EVERY_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(documents, "read", reading)
        patched.setattr(documents.Scanned, "unchanged", looking)
        with pytest.raises(RunAgain, match=r"2.jsonl can no longer be read \(Stale .* disk back"):
            tokens.prepare(what, tokenizer_path=words, folder=cache, say=silent)
    said: list[str] = []
    tokens.prepare(what, tokenizer_path=words, folder=cache, say=said.append)
    assert any("MB of text are already tokenized" in line for line in said)


def test_progress_is_reported_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / f"in/{number}.txt").write_text("яблоко и груша. " * 50)
    what = corpus(tmp_path / "in", tmp_path / "cache")
    reported: list[float] = []

    @contextlib.contextmanager
    def metered(name: str, total_mb: float, *_: object) -> Iterator[Callable[[float], None]]:
        if name == "tokenizing":
            reported.append(total_mb)
        yield reported.append

    monkeypatch.setattr(progress_bar, "metered", metered)
    prepare(what, tmp_path / "cache")
    assert reported[-1] == pytest.approx(reported[0])
