"""Models on the Hugging Face Hub: the real client against a server on loopback.

Run by name, because the URL of the server must be known before the client is imported:
``python -m pytest tests/interop/hub/models.py``.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from interop.hub import hub_server

HUB = hub_server.start()

import huggingface_hub.constants  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import safetensors.numpy  # noqa: E402
import yaml  # noqa: E402
from cli.test_generate import MODEL, saved  # noqa: E402
from doctor.examined import all_ok, subject, tiny  # noqa: E402
from interop.hub.hub_server import READER, WRITER, Fault, Repository  # noqa: E402
from models.video_ae import small_autoencoder  # noqa: E402
from program import TINY_MLM, two_processes, wait_for, write_corpus  # noqa: E402

import jaxtrain  # noqa: E402
from jaxtrain import main  # noqa: E402
from jaxtrain.data.text import byte_level  # noqa: E402
from jaxtrain.doctor import data as doctor_data  # noqa: E402
from jaxtrain.errors import InputError, RunAgain  # noqa: E402
from jaxtrain.interop import hub, weights  # noqa: E402
from jaxtrain.telemetry import line_files  # noqa: E402

# The client's own use of its HTTP library.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

BIG = 12 * 2**20  # bytes; the client writes pieces of 10 MiB
PIECE = 10 * 2**20
FILES = {
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def run(*arguments: Any) -> int:
    return main.main([*map(str, arguments)])


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty Hub, an empty cache, no login, and short pauses between attempts."""
    HUB.reset()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_PAUSES_S", (0.01, 0.01))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield
    assert not [one for one in HUB.requests if one.host == "localhost" and one.token]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a small GPT, its tokenizer and its metrics."""
    words = byte_level.train(["once upon a time there was a time"] * 4, 270)
    path = tmp_path_factory.mktemp("run") / "gpt"
    saved(path, MODEL, {"tokenizer.json": words.to_str().encode()})
    (path / line_files.METRICS).write_text(
        '{"step": 2, "time": 1.0, "val/loss": 3.0}\n'
        '{"step": 3, "time": 2.0, "val/loss": 2.5}\n{"step": 3, "time": 2.0, "train/loss": 2.0}\n'
    )
    return path


@pytest.fixture
def published(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """The small GPT, pushed to me/small."""
    with monkeypatch.context() as patched:
        patched.setenv("HF_TOKEN", WRITER)
        assert run("export", trained, "--push", "me/small", "--license", "mit") == 0
    HUB.requests.clear()
    return HUB.repositories["me/small"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 2) -> str:
    """Returns the one line with which a command fails."""
    capsys.readouterr()
    assert run(*arguments) == code
    *notes, line = capsys.readouterr().err.splitlines()
    assert all("trying again" in note or note.startswith("downloading ") for note in notes)
    assert line.startswith("error: ")
    return line


def big_file(seed: int = 0) -> bytes:
    array = np.random.default_rng(seed).integers(0, 255, BIG, np.uint8)
    return safetensors.numpy.save({"x": array})


def test_a_pushed_model_gives_the_same_text_and_parameters(
    trained: Path, published: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ("once upon", "--tokens", 12, "--seed", 3)
    assert run("generate", trained, *prompt) == 0
    expected = capsys.readouterr().out
    assert run("generate", "hf:me/small", *prompt) == 0
    printed = capsys.readouterr()
    assert printed.out == expected
    assert f"downloading hf:me/small (5 files, 0.1 MiB, commit {published.refs['main']}" in (
        printed.err
    )
    before, after = weights.load(trained), weights.load(hub.local("hf:me/small"))
    assert before.params.keys() == after.params.keys()
    for name, array in before.params.items():
        np.testing.assert_array_equal(after.params[name], array)
    asked = [one.path.rpartition("/")[2] for one in HUB.seen("GET", "/resolve/")]
    assert sorted(asked) == sorted(FILES - {"model.safetensors"})  # from the CDN
    assert len(HUB.seen("GET", "/cdn/")) == 1
    model = jaxtrain.load_model("hf:me/small@main")
    assert model.generate("once upon", tokens=12, seed=3) + "\n" == expected
    assert len(HUB.seen("GET", "/cdn/")) == 1  # from the cache


def test_the_model_card_states_what_the_checkpoint_records(published: Repository) -> None:
    card = published.files["README.md"].decode()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head == {
        "library_name": "transformers",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["jaxtrain", "gpt"],
    }
    assert "| val/loss | 2.5 |" in card
    assert "| steps | 3 |" in card
    assert 'jaxtrain.load_model("hf:me/small")' in card
    assert 'AutoModelForCausalLM.from_pretrained("me/small")' in card
    assert "train/loss" not in card


def test_a_second_push_keeps_the_edited_card(
    trained: Path,
    published: Repository,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", WRITER)
    published.commit({"README.md": b"mine", "tokenizer.json": b"{}"})
    assert run("export", trained, "--push", "me/small") == 0
    assert "me/small keeps its README.md" in capsys.readouterr().err
    assert published.files["README.md"] == b"mine"
    assert json.loads(published.files["tokenizer.json"])["model"]


def test_a_model_that_transformers_lacks_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = small_autoencoder.save(tmp_path / "a.safetensors")
    monkeypatch.setenv("HF_TOKEN", WRITER)
    assert run("export", source, "--push", "me/video", "--private") == 0
    assert HUB.repositories["me/video"].private
    files = set(HUB.repositories["me/video"].files)
    assert files == {".gitattributes", "README.md", "model.safetensors"}
    assert run("import", "hf:me/video", tmp_path / "b.safetensors") == 0
    before, after = weights.load(source), weights.load(tmp_path / "b.safetensors")
    assert before.model == after.model
    for name, array in before.params.items():
        np.testing.assert_array_equal(after.params[name], array)
    HUB.repositories["me/video"].private = False
    with pytest.raises(InputError, match="already exists and is public: make it private"):
        hub.push(tmp_path, "me/video", private=True, message="x", say=print)


def test_a_file_or_a_revision_can_be_named(published: Repository) -> None:
    first = published.refs["main"]
    other = safetensors.numpy.save({"x": np.zeros(1, np.float32)})
    second = published.commit({"model.safetensors": other, "old/x.safetensors": other})
    published.refs["v1"] = first
    assert hub.local("hf:me/small@v1").name == first
    assert hub.local(f"hf:me/small@{first[:40]}").name == first
    path = hub.local("hf:me/small@main:old/x.safetensors")
    assert path.read_bytes() == other
    assert path.parent.parent.name == second


def test_a_broken_download_resumes_where_it_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    content = big_file()
    HUB.add("me/big", {"big.safetensors": content})
    HUB.faults.append(Fault("/cdn/", sent=PIECE + 1000))
    path = hub.local("hf:me/big")
    first, second = HUB.seen("GET", "/cdn/")
    assert first.range is None
    assert (second.range, second.status) == (f"bytes={PIECE}-", 206)
    assert path.read_bytes() == content
    assert capfd.readouterr().err.count("\n") == 1


def child(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    """Starts a process that uses the Hub."""
    paths = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", f"from jaxtrain.interop import hub\n{code}"],
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_CACHE": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_killed_download_is_not_taken_for_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = big_file()
    HUB.add("me/big", {"big.safetensors": content})
    HUB.faults.append(Fault("/cdn/", sent=PIECE + 1000, pause_s=30))
    process = child("hub.local('hf:me/big')", tmp_path / "hub")
    begun = (tmp_path / "hub").rglob
    wait_for(lambda: list(begun("*.incomplete")) and HUB.seen("GET", "/cdn/"), process)
    process.kill()
    process.communicate()
    assert not list((tmp_path / "hub").rglob("big.safetensors"))
    with monkeypatch.context() as patched:
        patched.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(InputError, match="is not completely in the cache, and HF_HUB_OFFLINE"):
            hub.local("hf:me/big")
    assert hub.local("hf:me/big").read_bytes() == content


def test_what_was_downloaded_works_without_a_network(
    published: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hub.local("hf:me/small")
    before = len(HUB.requests)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub.local("hf:me/small") == folder
    assert hub.local(f"hf:me/small@{published.refs['main']}") == folder
    assert len(HUB.requests) == before
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"hf:me/small is not completely in the cache"):
        hub.local("hf:me/small")


@pytest.mark.parametrize(
    ("source", "token", "expected"),
    [
        ("hf:me/absent", READER, "hf:me/absent: no such model on http"),
        ("hf:me/absent", None, "hf:me/absent: no such model on http.*, or no access to it"),
        (
            "hf:me/small@v9",
            READER,
            "hf:me/small@v9: no such revision; use a branch, tag, or commit",
        ),
        ("hf:me/small", "wrong", r"does not accept the token .*401 Unauthorized.*: run hf auth"),
        ("hf:me/gated", READER, "access to this model is restricted: request it on http"),
        ("hf:me/small:x.pth", READER, "no such file; its weights files are 'model.safetensors'"),
    ],
)
def test_a_model_that_cannot_be_read_is_one_line(
    source: str,
    token: str | None,
    expected: str,
    published: Repository,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    HUB.add("me/gated", published.files, gated=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    line = refused(capsys, "generate", source, "once")
    assert re.search(expected, line), line


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (None, "--push me/new: you are not logged in: run hf auth login, or set HF_TOKEN"),
        ("wrong", "--push me/new: the Hub does not accept the token"),
        (
            READER,
            "--push me/new: the token has no write access there (the Hub answers 403 Forbidden)",
        ),
    ],
)
def test_a_push_without_rights_is_one_line(
    token: str | None,
    expected: str,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert expected in refused(capsys, "export", trained, "--push", "me/new")
    assert HUB.repositories == {}


@pytest.mark.parametrize("path", ["/api/models/", "/cdn/"])
def test_a_server_error_is_retried(path: str, published: Repository) -> None:
    HUB.faults.append(Fault(path, status=503, times=2))
    assert weights.load(hub.local("hf:me/small")).params
    assert [one.status for one in HUB.seen("GET", path)][:2] == [503, 503]


def test_lasting_server_errors_are_temporary_failures(
    trained: Path,
    published: Repository,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    HUB.faults.append(Fault("/api/models/", status=503, times=99))
    line = refused(capsys, "generate", "hf:me/small", "once", code=75)
    assert "cannot be reached (the Hub answers 503 Service Unavailable): run the command" in line
    assert "or set HF_HUB_OFFLINE=1 to use what was downloaded before" in line
    HUB.faults[:] = [Fault("/api/repos/create", "POST", status=502, times=99)]
    monkeypatch.setenv("HF_TOKEN", WRITER)
    line = refused(capsys, "export", trained, "--push", "me/new", code=75)
    assert "--push me/new: http" in line
    assert "me/new" not in HUB.repositories
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunAgain, match=r"http://127.0.0.1:9 cannot be reached \(ConnectError"):
        hub.local("hf:me/small")


def test_an_upload_that_breaks_publishes_nothing(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", WRITER)
    HUB.faults.append(Fault("/commit/", "POST", status=403, times=99))
    assert "the token has no write access" in refused(capsys, "export", trained, "--push", "me/new")
    assert set(HUB.repositories["me/new"].files) == {".gitattributes"}
    HUB.faults[:] = [Fault("/lfs/", "PUT", status=500)]
    assert run("export", trained, "--push", "me/new") == 0
    assert "model.safetensors" in HUB.repositories["me/new"].files
    assert [one.status for one in HUB.seen("PUT", "/lfs/")][-2:] == [500, 200]


def test_a_run_starts_from_a_model_and_resumes_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    fields = ["--data.path", str(write_corpus(tmp_path)), "--mesh.fsdp", "8"]
    command = [*TINY_MLM, *fields, "--output-dir"]
    assert run(*command, tmp_path / "first", "--loop.steps", 2) == 0
    monkeypatch.setenv("HF_TOKEN", WRITER)
    assert run("export", tmp_path / "first", "--push", "me/masked") == 0
    card = HUB.repositories["me/masked"].files["README.md"].decode()
    assert str(tmp_path) not in card
    assert "AutoModelForMaskedLM" in card
    HUB.requests.clear()
    capsys.readouterr()
    source = ["--model.init_from", "hf:me/masked"]
    seen = all_ok(doctor_data.inputs(subject(tmp_path, tiny(*fields, *source))))
    assert "model.init_from hf:me/masked is on the Hub (5 files" in seen
    assert "the run downloads it and checks its arrays" in seen
    assert not HUB.seen("GET", "/cdn/")
    assert run(*command, tmp_path / "second", *source, "--loop.steps", 2) == 0
    printed = capsys.readouterr().out
    assert "parameters from" in printed
    assert "tokenizer of model.init_from" in printed
    assert len(HUB.seen("GET", "/cdn/")) == 1
    recorded = json.loads((tmp_path / "second/config.json").read_text())
    assert recorded["model"]["init_from"] == "hf:me/masked"
    shutil.rmtree(tmp_path / "hub")
    HUB.requests.clear()
    again = ["--loop.steps", 3, "--resume", "latest"]
    assert run(*command, tmp_path / "second", *source, *again) == 0
    assert HUB.requests == []


def test_two_processes_of_a_run_use_the_same_commit_and_one_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    fields = [*TINY_MLM, "--data.path", str(tmp_path / "corpus"), "--loop.steps", "2"]
    assert run(*fields, "--mesh.fsdp", "8", "--output-dir", tmp_path / "first") == 0
    monkeypatch.setenv("HF_TOKEN", WRITER)
    assert run("export", tmp_path / "first", "--push", "me/masked") == 0
    HUB.requests.clear()
    arguments = ["--mesh.fsdp", "2", "--simulate-devices", "2", "--output-dir", "second"]
    cache = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    with two_processes(
        tmp_path, *fields, *arguments, "--model.init_from", "hf:me/masked", both=cache
    ) as started:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    assert len(HUB.seen("GET", "/cdn/")) == 1
    assert len(HUB.seen("GET", "/api/models/.*blobs")) == 1  # only process 0 looks it up
