"""Hugging Face datasets: read from folders, part by part; and the message without a network.

Run by name, because the package datasets is an optional extra:
``python -m pytest tests/interop/hf_datasets.py``.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from small_text import Model

from jaxtrain import main
from jaxtrain.data.text import Masked, hub_datasets
from jaxtrain.errors import InputError

TEXTS = [f"Document number {number} has some words in it." for number in range(100)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same 100 documents in each kind of folder, and another split."""
    top = tmp_path_factory.mktemp("hf")
    datasets.disable_progress_bars()
    whole = datasets.Dataset.from_dict({"text": TEXTS, "label": list(range(100))})
    other = datasets.Dataset.from_dict({"text": TEXTS[:7], "label": list(range(7))})
    whole.save_to_disk(top / "saved")
    datasets.DatasetDict({"train": whole, "test": other}).save_to_disk(top / "splits")
    (top / "hub/data").mkdir(parents=True)
    whole.select(range(50)).to_parquet(top / "hub/data/train-00000-of-00002.parquet")
    whole.select(range(50, 100)).to_parquet(top / "hub/data/train-00001-of-00002.parquet")
    other.to_parquet(top / "hub/data/test-00000-of-00001.parquet")
    (top / "lines").mkdir()
    (top / "lines/train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return top


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_datasets, "_PART_DOCUMENTS", 30)


def fetch(spec: str, root: Path, most: int | None = None) -> list[str]:
    """The documents that a run would use."""
    folder, parts = hub_datasets.fetch(spec, "--data.path", root, None, most, lambda line: None)
    tables = [pyarrow.parquet.read_table(p) for p in sorted(folder.glob("part-*"))[:parts]]
    return [text for table in tables for text in table["text"].to_pylist()]


@pytest.mark.parametrize("form", ["saved", "splits", "hub", "lines"])
def test_fetching_resumes_for_every_kind_of_folder(
    form: str, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # a folder needs no network
    assert fetch(f"hf:{folders / form}", tmp_path / "complete") == TEXTS
    assert fetch(f"hf:{folders / form}", tmp_path, 31) == TEXTS[:60]
    (target,) = tmp_path.glob(f"*{form}*/")
    first = {path.name: path.stat().st_mtime_ns for path in target.glob("part-*")}
    assert len(first) == 2
    assert fetch(f"hf:{folders / form}", tmp_path) == TEXTS
    again = {name: (target / name).stat().st_mtime_ns for name in first}
    assert again == first  # existing parts are not fetched again
    assert fetch(f"hf:{folders / form}", tmp_path, 20) == TEXTS[:30]


def test_a_kill_while_fetching_loses_no_part(folders: Path, tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from jaxtrain.data.text import hub_datasets\n"
        "hub_datasets._PART_DOCUMENTS = 30\n"
        "write, calls = hub_datasets._write_part, []\n"
        "def dying(path, texts):\n"
        "    write(path, texts)\n"
        "    calls.append(path)\n"
        "    if len(calls) == 2:\n"
        "        os.kill(os.getpid(), 9)\n"
        "hub_datasets._write_part = dying\n"
        "hub_datasets.fetch(sys.argv[1], '', Path(sys.argv[2]), None, None, print)\n"
    )
    spec = f"hf:{folders / 'hub'}"
    died = subprocess.run(
        [sys.executable, "-c", program, spec, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert died.returncode == -9
    assert fetch(spec, tmp_path) == TEXTS


def test_splits_and_columns_are_selected_by_name(folders: Path, tmp_path: Path) -> None:
    assert fetch(f"hf:{folders / 'hub'}::test", tmp_path) == TEXTS[:7]
    assert fetch(f"hf:{folders / 'splits'}::test", tmp_path) == TEXTS[:7]
    with pytest.raises(InputError, match="no split nope, only train, test: write hf:"):
        fetch(f"hf:{folders / 'hub'}::nope", tmp_path)
    with pytest.raises(InputError, match="write hf:NAME, hf:NAME:CONFIG, or"):
        fetch("hf:a:b:c:d", tmp_path)
    for field, words in (("body", "its columns are 'text', 'label': set"), ("label", "not text")):
        with pytest.raises(InputError, match=words):
            hub_datasets.fetch(
                f"hf:{folders / 'hub'}", "", tmp_path, field, None, lambda line: None
            )


@pytest.mark.parametrize("named", ["{}/mine.txt", "../mine.txt", "file://{}/mine.txt"])
def test_a_dataset_cannot_read_other_files(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "mine.txt").write_text("my key")
    (tmp_path / "theirs").mkdir()
    lists = f"configs:\n- config_name: default\n  data_files: {named.format(tmp_path)}\n"
    (tmp_path / "theirs/README.md").write_text(f"---\n{lists}---\n")
    with pytest.raises(InputError, match=r"mine.txt', which is not one of its own files"):
        fetch(f"hf:{tmp_path}/theirs", tmp_path / "cache")


def test_a_saved_dataset_cannot_read_another_one(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "saved", tmp_path / "theirs")
    state = json.loads((tmp_path / "theirs/state.json").read_text())
    (file,) = state["_data_files"]
    file["filename"] = str(folders / "saved" / file["filename"])
    (tmp_path / "theirs/state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"arrow', which is not one of its own files"):
        fetch(f"hf:{tmp_path}/theirs", tmp_path / "cache")


def test_a_link_to_a_dataset_is_followed(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "link").symlink_to(folders)
    for form in ("saved", "hub", "lines"):
        assert fetch(f"hf:{tmp_path}/../{tmp_path.name}/link/{form}", tmp_path, 30) == TEXTS[:30]


def test_a_changed_folder_is_fetched_again(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for texts in (TEXTS[:5], TEXTS[5:12]):
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        assert fetch(f"hf:{folder}", tmp_path / "cache") == texts


def test_a_missing_network_is_reported_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    arguments = ["prepare", "tokens", "--config", "demo_mlm", "--data.path", "hf:some/name"]
    assert main.main([*arguments, "--data.cache_dir", str(tmp_path)]) == 75
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert "hf:some/name: http://127.0.0.1:9 cannot be reached" in error
    assert "or pass a folder with the dataset as hf:FOLDER" in error


def test_a_run_reads_a_dataset_like_files(folders: Path, tmp_path: Path) -> None:
    config = Masked(
        path=f"hf:{folders / 'hub'}", batch_size=2, cache_dir=str(tmp_path), max_examples=50
    )
    sources = config.open(Model(), seed=0, say=lambda line: None)
    assert sources.files == 2
    counts = re.findall(r"(\d+) documents", sources.summary)
    assert sum(map(int, counts)) == 50
    example = sources.train.example(0, np.random.default_rng(0))
    assert example["tokens"].shape == (32,)
