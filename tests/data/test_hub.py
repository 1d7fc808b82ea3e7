"""Hugging Face datasets where the package is missing; the rest is tests/interop/hf_datasets.py."""

import sys
from pathlib import Path

import pytest

from jaxtrain.data import hub
from jaxtrain.errors import InputError


@pytest.mark.parametrize("spec", ["hf:some/name", "hf:."])
def test_a_missing_package_names_the_extra(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"--data.path hf:.* pip install 'jaxtrain\[hf\]'"):
        hub.fetch(spec, "--data.path", tmp_path, None, None, lambda line: None)


def test_names_are_told_from_paths() -> None:
    assert hub.is_named("hf:imdb")
    assert not hub.is_named("texts/hf:imdb")
