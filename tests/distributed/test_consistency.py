"""The comparison of config, code, and packages between processes, before a run."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from distributed.fake_key_value import FakeClient

from jaxtrain import config
from jaxtrain.distributed import consistency
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.errors import InputError, RunAgain


def checked(every: list[dict[str, dict[str, str]]]) -> list[str]:
    """Returns the error of each process; empty where there is none."""

    def error(own: dict[str, dict[str, str]], store: KeyValueStore) -> str:
        try:
            consistency.check(own, store)
        except InputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(every)) as pool:
        return list(pool.map(error, every, FakeClient(len(every)).stores()))


def facts(**changes: object) -> dict[str, dict[str, str]]:
    run = config.load("demo_mlm", [text for pair in changes.items() for text in _override(*pair)])
    return consistency.facts(run, {"--debug": False})


def _override(name: str, value: object) -> tuple[str, str]:
    return f"--{name.replace('__', '.')}", str(value)


def test_all_processes_raise_the_same_error_about_a_field_that_differs() -> None:
    every = [facts()] * 5
    every[3] = facts(optim__peak_lr=0.5, seed=9)
    errors = checked(every)
    assert len(set(errors)) == 1
    lr = config.load("demo_mlm", []).optim.peak_lr
    assert f"optim.peak_lr is {lr} in processes 0-2, 4 and 0.5 in process 3" in errors[0]
    assert "seed is 42 in processes 0-2, 4 and 9 in process 3" in errors[0]
    assert errors[0].endswith("start all with the same command line")
    assert "\n" not in errors[0]


def test_fields_that_may_differ_per_host_are_not_compared() -> None:
    own = facts(data__path="/mnt/a", data__cache_dir="/tmp/a", data__workers=7, data__prefetch=1)
    assert checked([facts(), own]) == ["", ""]
    everything = set(facts()["config"]) | set(consistency.PER_HOST)
    flat = config.to_dict(config.load("demo_mlm", []))
    assert "seed" in everything
    for name in consistency.PER_HOST:  # every name is a field of the config
        section, field = name.split(".")
        assert field in flat[section]


def test_flags_packages_and_code_are_compared() -> None:
    run = config.load("demo_mlm", [])
    own = consistency.facts(run, {"--debug": False})
    debug = consistency.facts(run, {"--debug": True})
    assert "--debug is False in process 0 and True in process 1" in consistency.compare(
        [own, debug]
    )
    package = own | {"package": own["package"] | {"jax": "0.0.1"}}
    found = consistency.compare([own, package])
    assert f"jax is {own['package']['jax']} in process 0 and 0.0.1 in process 1" in found
    assert found.endswith("install the same packages on every host")
    digest = own["code"]["code"].split()[0]
    assert len(digest) == 12
    found = consistency.compare([own, own | {"code": {"code": "ab (commit c1)"}}])
    assert "ab (commit c1) in process 1: install the same jaxtrain on every host" in found
    # A checkout and an installed package with the same files.
    assert not consistency.compare([own, own | {"code": {"code": digest}}])


def test_the_code_digest_depends_on_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = config.load("demo_mlm", [])
    package = tmp_path / "jaxtrain"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(consistency, "__file__", str(package / "distributed" / "consistency.py"))
    first = consistency.facts(run, {})["code"]
    (package / "a.py").write_text("x = 2\n")
    second = consistency.facts(run, {})["code"]
    (package / "a.py").write_text("x = 1\n")
    assert first != second
    assert first == consistency.facts(run, {})["code"]


def test_a_process_that_is_gone_is_a_temporary_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "_PATIENCE_S", 0.1)
    with pytest.raises(RunAgain, match="DEADLINE_EXCEEDED") as error:
        consistency.check(facts(), FakeClient().stores()[0])
    assert "\n" not in str(error.value)


def test_the_code_of_a_config_file_includes_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "my_own_layers.py").write_text("WIDTH = 32\n")
    own = tmp_path / "own.py"
    own.write_text(
        "import my_own_layers\nfrom jaxtrain import config\nrun = config.named('demo_mlm')\n"
    )
    before = consistency.code_digests(config.load(str(own), []))
    assert {"own.py", "my_own_layers.py", "jaxtrain/sharding.py"} <= before.keys()
    (tmp_path / "my_own_layers.py").write_text("WIDTH = 64\n")
    after = consistency.code_digests(config.load(str(own), []))
    assert [name for name in after if after[name] != before[name]] == ["my_own_layers.py"]
