"""Datasets on the Hugging Face Hub: the real client against a server on loopback.

Run by name, because the URL of the server must be known before the client is imported:
``python -m pytest tests/interop/hub/datasets.py``.
"""

import io
import json
import re
from pathlib import Path

from interop.hub import hub_server

HUB = hub_server.start()

import huggingface_hub.constants  # noqa: E402
import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402
import pytest  # noqa: E402
from data.text.small_text import Model  # noqa: E402
from interop.hub.hub_server import READER, Fault  # noqa: E402

from jaxtrain import main  # noqa: E402
from jaxtrain.data.text import Masked, documents  # noqa: E402
from jaxtrain.errors import InputError, RunAgain  # noqa: E402

NAME = "org/name"
TEXTS = [f"Document number {number} has some words in it." for number in range(100)]


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty Hub, an empty cache, and no login."""
    HUB.reset()
    # The workers' client reads the environment, and this one has read it.
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), file)
    return file.getvalue()


def card(text: str) -> bytes:
    return f"---\nlicense: mit\n{text}---\n# Card\n".encode()


def add(files: dict[str, bytes], **fields: bool) -> hub_server.Repository:
    return HUB.add(f"datasets/{NAME}", {"README.md": card(""), **files}, **fields)


def find(spec: str, root: Path, said: list[str] | None = None) -> list[documents.File]:
    return documents.find(spec, "--data.path", root, [].append if said is None else said.append)


def names(spec: str, root: Path) -> list[str]:
    return [file.name for file in find(spec, root)]


def summary(root: Path, path: str = f"hf:{NAME}", **fields: object) -> str:
    config = Masked(path=path, batch_size=2, cache_dir=str(root), **fields)  # type: ignore[arg-type]
    return config.open(Model(), seed=0, say=lambda line: None).summary


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_a_run_reads_the_files_of_a_dataset_at_its_commit(tmp_path: Path, kind: str) -> None:
    write = {"jsonl": lines, "parquet": parquet, "txt": lambda texts: "\n".join(texts).encode()}
    repository = add(
        {
            f"data/train-00000-of-00002.{kind}": write[kind](TEXTS[:50]),
            f"data/train-00001-of-00002.{kind}": write[kind](TEXTS[50:]),
            f"data/test-00000-of-00001.{kind}": write[kind](TEXTS[:7]),
            "data/train-notes.csv": b"a,b",
            "load.py": b"raise SystemExit('run')",
        }
    )
    first = summary(tmp_path / "cache")
    assert "3 text files (0 bad)" in first
    counted = sum(map(int, re.findall(r"(\d+) documents", first)))
    assert counted == (2 if kind == "txt" else 100)
    assert len(HUB.seen("GET", "resolve.*train-0000")) == 2
    assert not HUB.seen("GET", "resolve.*(load.py|csv|test-)")
    # It changes on the Hub; a resumed run finds the same commit, without asking the Hub.
    before = repository.refs["main"]
    repository.commit({f"data/train-00000-of-00002.{kind}": write[kind](TEXTS[:20])})
    HUB.requests.clear()
    said: list[str] = []
    files = find(f"hf:{NAME}", tmp_path / "cache", said)
    assert all(f"@{before}/" in file.path for file in files)
    assert not HUB.requests
    assert said[:1] == [
        f"--data.path hf:{NAME}: uses commit {before[:12]}, as before; for another one, write "
        f"hf:{NAME}@REVISION"
    ]
    assert summary(tmp_path / "cache") == first
    assert not HUB.requests
    newer = find(f"hf:{NAME}@main", tmp_path / "cache")
    assert all(f"@{repository.refs['main']}/" in file.path for file in newer)
    assert all(file != other for file, other in zip(files, newer, strict=True))
    changed = [a.name for a, b in zip(files, newer, strict=True) if a.version != b.version]
    assert changed == [f"data/train-00000-of-00002.{kind}"]


def test_a_glob_chooses_files_at_one_commit_and_names_say_the_sides(tmp_path: Path) -> None:
    sides = ("train", "validation", "test")
    files = {
        f"{folder}/{side}.jsonl": lines(TEXTS[30 * number : 30 * number + 30])
        for folder in ("en", "de")
        for number, side in enumerate(sides)
    }
    repository = add({**files, ".hidden/train.jsonl": lines(["a"]), "en/notes.csv": b"a,b"})
    with pytest.raises(InputError, match=r"several folders have text: .*de/ \(3 .jsonl\), en/"):
        names(f"hf:{NAME}", tmp_path)
    said: list[str] = []
    repository.commit({"en/later.jsonl": lines(["a"])})
    for pattern, expected in (
        ("en", ["en/test.jsonl", "en/train.jsonl", "en/validation.jsonl"]),
        ("*/train*", ["de/train.jsonl", "en/train.jsonl"]),
    ):
        found = [file.name for file in find(f"hf:{NAME}:{pattern}", tmp_path, said)]
        assert found == expected
    assert f"--data.path hf:{NAME}:en: skipped 1 of 4 files, which are of other kinds: 1 .csv" in (
        line.partition(";")[0] for line in said
    )
    config = Masked(path=f"hf:{NAME}:en", batch_size=2, cache_dir=str(tmp_path / "cache"))
    summary = config.open(Model(), seed=0, say=said.append).summary
    assert any("1 of 4 files train, and 1 validate" in line for line in said)
    assert "train: 0" not in summary
    assert not HUB.seen("GET", "resolve.*test")


def test_the_conversion_of_the_hub_is_a_revision(tmp_path: Path) -> None:
    repository = add({"data/train.csv": b"text\na"})
    with pytest.raises(InputError, match=r"data/ \(1 .csv\): .* hf:org/name@refs/convert/parquet"):
        names(f"hf:{NAME}", tmp_path)
    repository.commits["converted"] = {
        "default/train/0000.parquet": parquet(TEXTS[:60]),
        "default/train/0001.parquet": parquet(TEXTS[60:]),
        "default/partial-validation/0000.parquet": bytes(1000),
    }
    repository.refs["refs/convert/parquet"] = "converted"
    converted = f"hf:{NAME}@refs/convert/parquet"
    with pytest.raises(InputError, match="only the first part of a split to parquet"):
        names(converted, tmp_path)
    assert len(names(f"{converted}:default/train", tmp_path)) == 2
    assert "2 text files" in summary(tmp_path / "cache", f"{converted}:default/train")


def test_private_and_gated_datasets_need_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add({"train.jsonl": lines(TEXTS)}, private=True)
    with pytest.raises(InputError, match=r"hf:org/name: no such dataset .* run hf auth login"):
        names(f"hf:{NAME}", tmp_path)
    with pytest.raises(InputError, match="hf:org/gone: no such dataset on the Hub"):
        names("hf:org/gone", tmp_path)
    with monkeypatch.context() as patch:
        patch.setenv("HF_TOKEN", READER)
        assert names(f"hf:{NAME}", tmp_path) == ["train.jsonl"]
        with pytest.raises(InputError, match="no such revision; use a branch, tag, or commit"):
            names(f"hf:{NAME}@nope", tmp_path)
    add({"train.jsonl": lines(TEXTS)}, gated=True)
    with pytest.raises(InputError, match="access to this dataset is restricted: request it on"):
        summary(tmp_path / "cache")


def test_a_hub_that_fails_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add({"train.jsonl": lines(TEXTS)})
    HUB.faults.append(Fault("/api/datasets", status=503, times=99))
    with pytest.raises(RunAgain, match=f"hf:{NAME}: {HUB.base} cannot be reached"):
        names(f"hf:{NAME}", tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    arguments = ["prepare", "tokens", "--config", "demo_mlm", "--data.path", "hf:some/name"]
    assert main.main([*arguments, "--data.cache_dir", str(tmp_path)]) == 75
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert "hf:some/name: http://127.0.0.1:9 cannot be reached" in error
    assert "on a connected machine, run" in error
