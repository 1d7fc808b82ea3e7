"""Names of models on the Hub, the files that are downloaded, and model cards; no network.

``tests/interop/hub/models.py`` tests transfers.
"""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from models.video_ae import small_autoencoder

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.interop import hub, model_card
from jaxtrain.models import gpt


def test_a_name_has_a_repository_a_revision_and_a_file() -> None:
    assert hub.is_named(Path("hf:org/model"))
    assert not hub.is_named("org/model")
    for text, expected in {
        "hf:org/model": ("org/model", "", ""),
        "hf:gpt2@v1.0": ("gpt2", "v1.0", ""),
        "hf:org/model@refs/pr/3": ("org/model", "refs/pr/3", ""),
        "hf:org/model:a/x.pth": ("org/model", "", "a/x.pth"),
        "hf:org/model@main:x.safetensors": ("org/model", "main", "x.safetensors"),
    }.items():
        named = hub.parse(text)
        assert (named.repository, named.revision, named.file) == expected


@pytest.mark.parametrize(
    "text",
    ["hf:", "hf:org/model@", "hf:/org/model", "hf:a/b/c", "hf:../x", "hf:org/mo del", "hf://a/b"],
)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^model.init_from hf:.*: write hf:ORG/MODEL\[@REVISION"):
        hub.parse(text, "model.init_from")


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (socket.EAI_NONAME, InputError, "is an unknown host, or this machine has no network"),
        (socket.EAI_AGAIN, RunAgain, "name resolution|cannot be reached"),
    ],
)
def test_an_unknown_host_is_wrong_input(
    number: int,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name server that does not answer is a temporary failure."""

    def fails(*arguments: object, **named: object) -> None:
        raise socket.gaierror(number, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    monkeypatch.setattr(hub, "_PAUSES_S", ())
    with pytest.raises(kind, match=f"hf:org/model: .*{message}"):
        hub.local("hf:org/model", say=lambda line: None)


@pytest.mark.parametrize("file", ["", "x.py", "../x.pth", "/x.pth", "a/b.zip"])
def test_only_weights_files_of_the_repository_can_be_named(file: str) -> None:
    with pytest.raises(InputError, match="FILE must be a weights file of the repository"):
        hub.parse(f"hf:org/model:{file}")


def needed(*names: str, file: str = "", index: Path | None = None) -> list[str]:
    def fetched() -> Path:
        assert index is not None, "the index was fetched without need"
        return index

    named = hub.Named("org/model", "", file, "hf:org/model")
    return list(hub._needed(named, dict.fromkeys(names, 1), fetched))


def test_only_what_jaxtrain_reads_is_downloaded_and_the_settings_last() -> None:
    code = ("modeling.py", "pytorch_model.bin", "training_args.bin", "README.md")
    one = ("model.safetensors", "tokenizer.json", "config.json")
    assert needed(*code, *sorted(one), "vocab.txt", "onnx/model.safetensors") == list(one)
    assert needed(*code, "weights.safetensors", "a/b.safetensors") == ["weights.safetensors"]
    assert needed(*code, *one, file="model.safetensors") == ["model.safetensors"]


def test_an_index_decides_which_parts_are_downloaded(tmp_path: Path) -> None:
    """A folder may also have the parts of another version, and a part any name."""
    index = tmp_path / "model.safetensors.index.json"
    parts = ["first.safetensors", "model-2-of-2.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": parts[1], "b": parts[0], "c": parts[1]}}))
    there = ("config.json", index.name, "model-1-of-9.safetensors", *parts)
    assert needed(*there, index=index) == [*parts, index.name, "config.json"]
    with pytest.raises(InputError, match=r"lists 'first.safetensors', which the repository does n"):
        needed("config.json", index.name, parts[1], index=index)
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(InputError, match=r"only .safetensors files of its own folder are allowed"):
        needed(*there, index=index)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ("config.json", "pytorch_model.bin"),
            "are 'pytorch_model.bin': use a revision with safe",
        ),
        (("a.safetensors", "b.safetensors"), "are 'a.safetensors', 'b.safetensors': name one as"),
        (
            ("a.pth", "b/c.safetensors"),
            "are 'a.pth', 'b/c.safetensors': name one as hf:org/model:F",
        ),
        (("model.py",), "has no config.json, and its weights files are none"),
    ],
)
def test_a_repository_without_a_readable_model_is_refused(
    names: tuple[str, ...], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        needed(*names)


def card(folder: Path, model: object, **fields: str | None) -> str:
    folder.mkdir(exist_ok=True)
    settings: dict[str, Any] = {"repository": "org/model", "license_name": None, **fields}
    settings |= {"parameters": 5, "checks": ["Read back."]}
    assert model_card.write(folder, model, folder / "source", **settings)
    return (folder / "README.md").read_text()


def test_a_card_invents_nothing(tmp_path: Path) -> None:
    text = card(tmp_path / "a", small_autoencoder.config())
    head = yaml.safe_load(text.split("---\n")[1])
    assert head == {"library_name": "jaxtrain", "tags": ["jaxtrain", "video_ae"]}
    for line in (
        "No validation of these parameters is recorded.",
        "No training details are recorded.",
        "The author has not named a license.",
        "## Checks\n\n- Read back.\n",
        'model = jaxtrain.load_model("hf:org/model")',
        "jaxtrain reconstruct hf:org/model IN.mp4 OUT.mp4",
    ):
        assert line in text
    assert "transformers" not in text
    assert not model_card.write(
        tmp_path / "a",
        gpt.Config.tiny(),
        tmp_path,
        repository=None,
        license_name=None,
        parameters=1,
        checks=(),
    ), "an existing card is kept"
    odd = 'a"b: c'
    head = yaml.safe_load(card(tmp_path / "b", gpt.Config.tiny(), license_name=odd).split("---")[1])
    assert head["license"] == odd


def test_a_card_shows_only_the_last_part_of_paths() -> None:
    config = {
        "data": {
            "path": ["/home/me/secret/books", "hf:org/data@main", "s3://bucket/key/x.tar?a=b"]
        },
        "model": {"init_from": "hf:org/model", "width": 3, "teacher": None},
        "precision": "bfloat16",
    }
    assert model_card._public(config) == {
        "data": {"path": ["books", "hf:org/data@main", "x.tar"]},
        "model": {"init_from": "hf:org/model", "width": 3, "teacher": None},
        "precision": "bfloat16",
    }
    assert model_card._dataset("hf:org/data@main:default:train") == "org/data"
    assert model_card._dataset("hf:/home/me/data") == ""
    assert model_card._public("hf:/home/me/data") == "data"
