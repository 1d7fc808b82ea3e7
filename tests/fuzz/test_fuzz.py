"""The harness detects forbidden outcomes, and a seed reproduces its case."""

import json
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz import cases, formats, isolation, mutate, verdict
from fuzz.sandbox import Ended, Sandbox

ENDS = {
    "traceback": "stderr: Traceback (most recent call last): KeyError: 'model'",
    "two_lines": "exit 2 with 1 lines of error",
    "other_code": "exit 1",
    "aborts": "signal 6",
    "eats_memory": "memory: above",
    "hangs": "deadline",
}
ACTS = (
    "writes: open",
    "writes: os.rename",
    "changes in/a.json",
    "starts: subprocess.Popen true",
    "leaves a process: a fork",
    "connects: socket.connect",
    "runs: ",
    "unpickles: posix.system",
    "control character '\\x1b'",
    "a line of more than",
)
MEMORY_BYTES = 2**28


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    place = tmp_path_factory.mktemp("fuzz")
    with Sandbox(place / "case", place / "compiled") as made:
        yield made


def run(sandbox: Sandbox, name: str) -> Ended:
    (sandbox.clear() / "a.json").write_text("{}")
    limit_s = 3.0 if name == "hangs" else 60.0
    entry = f"fuzz.planted:{name}"
    # A fresh process imports little, so its memory and time are those of the case.
    return sandbox.run([], fresh=True, entry=entry, memory_bytes=MEMORY_BYTES, seconds=limit_s)


@pytest.mark.parametrize("name", ENDS)
def test_forbidden_ends_are_detected(sandbox: Sandbox, name: str) -> None:
    ended = run(sandbox, name)
    found = verdict.problems(ended, ["import"], memory_bytes=MEMORY_BYTES)
    assert any(ENDS[name] in one for one in found), (found, ended)


def test_forbidden_acts_are_detected(sandbox: Sandbox) -> None:
    ended = run(sandbox, "acts")
    found = verdict.problems(ended, ["import"], memory_bytes=MEMORY_BYTES)
    assert not [act for act in ACTS if not any(act in one for one in found)], (found, ended)


@pytest.mark.parametrize(("name", "outcome"), [("works", "worked"), ("refuses", "refused")])
def test_allowed_outcomes_pass(sandbox: Sandbox, name: str, outcome: str) -> None:
    ended = run(sandbox, name)
    assert not verdict.problems(ended, ["import"], memory_bytes=MEMORY_BYTES)
    assert verdict.outcome(ended) == outcome


@pytest.mark.slow
def test_a_forked_case_has_the_same_verdict_as_a_fresh_process(sandbox: Sandbox) -> None:
    for name, wanted in (("works", ""), ("traceback", "Traceback"), ("connects", "connects: ")):
        (sandbox.clear() / "a.json").write_text("{}")
        ended = sandbox.run([], fresh=False, entry=f"fuzz.planted:{name}")
        found = verdict.problems(ended, ["import"])
        assert wanted in " ".join(found)
        assert bool(found) == bool(wanted), found


def test_prepare_may_report_bad_inputs() -> None:
    ended = Ended(1, 1.0, 0, False, {"stdout": b"failed", "stderr": b""}, (), frozenset(), (), ())
    assert not verdict.problems(ended, ["prepare", "clips"])
    assert verdict.problems(ended, ["export", "in/run"])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Writes files like those of the harness's corpus, without jax."""
    place = tmp_path / "corpus"
    model = json.dumps({"class": "gpt", "depth": 2})
    header = json.dumps({"__metadata__": {"jaxtrain_model": model}, "w": {"dtype": "F32"}})
    file = struct.pack("<Q", len(header)) + header.encode() + bytes(64)
    names = {name for kind in cases.KINDS.values() for seed in kind.seeds for name in seed.files}
    for name in sorted(names):
        path = place / name
        if path.suffix:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file if path.suffix == ".safetensors" else b'[{"path": "a.mp4"}]\n')
            continue
        path.mkdir(parents=True)
        for inner in ("config.json", "tokenizer.json"):
            (path / inner).write_text(json.dumps({"files": {}, "step": 3, "layers": 2}))
    return place


def tree(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = os.fsdecode(os.fsencode(path.relative_to(folder)))
        found[name] = (
            os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        )
    return found


@pytest.mark.parametrize("kind", sorted({*cases.KINDS} - {"pth", "parquet", "tar"}))
def test_a_seed_determines_the_case(corpus: Path, tmp_path: Path, kind: str) -> None:
    for seed in range(20):
        made = []
        for number in range(2):
            folder = tmp_path / f"{seed}-{number}" / "in"
            folder.mkdir(parents=True)
            (folder.parent / "out").mkdir()
            made.append((cases.make(kind, seed, corpus, folder), tree(folder.parent)))
        assert made[0] == made[1]


@pytest.mark.parametrize("mutation", [mutate.raw_bytes, mutate.json_text, mutate.json_lines])
def test_mutations_change_most_files_and_are_reproducible(mutation: mutate.Mutation) -> None:
    data = json.dumps({"a": [1, 2.5, "text"], "b": {"c": None, "d": '{"class": "gpt"}'}}).encode()
    found = [mutation(random.Random(seed), data) for seed in range(300)]
    assert found == [mutation(random.Random(seed), data) for seed in range(300)]
    assert len({*found}) > 150


def test_most_changed_headers_have_a_valid_length() -> None:
    header = json.dumps({"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [2]}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(8)
    found = [formats.safetensors(random.Random(seed), data) for seed in range(100)]
    assert (
        sum(len(one) - 16 == struct.unpack("<Q", one[:8])[0] for one in found if len(one) > 8) > 40
    )


def test_a_missing_namespace_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert not isolation.inside()
    assert "unshare" in isolation.enter([])
