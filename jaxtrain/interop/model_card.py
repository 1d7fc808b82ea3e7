"""Writes the model card of an exported model: the README.md that the Hugging Face Hub shows.

It states only what the model and its checkpoint record. Of paths and URLs it shows only the
last part, as the card may be published: folders, buckets and user names stay private.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from jaxtrain import versions
from jaxtrain.checkpoint import pointer
from jaxtrain.data.text import hub_datasets
from jaxtrain.errors import one_line
from jaxtrain.interop import huggingface
from jaxtrain.models import from_file
from jaxtrain.storage import addresses, atomic, json_lines
from jaxtrain.telemetry import line_files

_TASKS = {"ForCausalLM": "text-generation", "ForMaskedLM": "fill-mask"}
_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_FRAMES = 'video = model.decode(model.encode("IN.mp4"))'
_METHODS = {
    "text-generation": 'print(model.generate("Once upon a time"))',
    "fill-mask": 'print(model.fill_mask("Paris is the [MASK] of France."))',
}


def write(
    folder: Path,
    model: Any,
    source: Path,
    *,
    repository: str | None,
    license_name: str | None,
    parameters: int,
    checks: Sequence[str],
) -> bool:
    """Writes the card into a folder, unless it has one, which its owner may have edited.

    Args:
        license_name: such as ``apache-2.0``; None leaves the field to the user.
    """
    path = folder / huggingface.CARD
    if path.exists():
        return False
    settings = (folder / huggingface.SETTINGS).is_file()
    text = _text(model, source, folder.name, repository, license_name, parameters, settings, checks)
    atomic.write_whole(path, text)
    return True


def _text(
    model: Any,
    source: Path,
    name: str,
    repository: str | None,
    license_name: str | None,
    parameters: int,
    is_folder: bool,
    checks: Sequence[str],
) -> str:
    path = pointer.find(source)
    meta = {} if path is None or not pointer.is_complete(path) else pointer.read_meta(path)
    run = meta.get("config") or {}
    kind = from_file.name_of(model)
    from huggingface_hub import ModelCardData  # takes half a second

    settings = model.to_settings() if is_folder else {}
    architecture = settings.get("architectures", [""])[0]
    library = ("transformers" if architecture else "diffusers") if settings else "jaxtrain"
    task = next((task for end, task in _TASKS.items() if architecture.endswith(end)), "")
    data = run.get("data")
    paths = _paths(data.get("path") if isinstance(data, Mapping) else None)
    datasets = [dataset for path in paths if (dataset := _dataset(path))]
    head = ModelCardData(
        library_name=library,
        license=license_name,
        pipeline_tag=task or None,
        datasets=datasets or None,
        tags=["jaxtrain", kind],
    )
    title = repository or name
    lines = [
        "---",
        head.to_yaml(),
        "---",
        "",
        f"# {one_line(title.rpartition('/')[2])}",
        "",
        f"The jaxtrain model `{kind}` with {parameters:,} parameters.",
        "",
        *_usage(model, architecture, task, repository),
        "## Training",
        "",
        *(_training(meta, run, paths) if run else ["No training details are recorded."]),
        "",
        "## Metrics",
        "",
        *_metrics(source, meta),
        "",
        "## Checks",
        "",
        *(f"- {sentence}" for sentence in checks),
        "",
        "## Versions",
        "",
        f"Exported with {versions.line()}.",
        "",
    ]
    lines += _trained_with(meta.get("versions"))
    if not license_name:
        lines += ["## License", "", "The author has not named a license.", ""]
    return "\n".join(lines)


def _usage(model: Any, architecture: str, task: str, repository: str | None) -> list[str]:
    source = "hf:" + repository if repository else "FOLDER"
    command = model.usage.format(run=source, input="IN.mp4", out="")
    lines = [
        "## Use",
        "",
        "With jaxtrain:",
        "",
        "```python",
        "import jaxtrain",
        "",
        f'model = jaxtrain.load_model("{source}")',
        _METHODS.get(task, _FRAMES),
        "```",
        "",
    ]
    if command:
        lines += ["```sh", f"jaxtrain {command}", "```", ""]
    if model.diffusers_class:
        lines += [
            "With diffusers, after a download of this folder:",
            "",
            "```python",
            f"from diffusers import {model.diffusers_class}",
            "",
            f'model = {model.diffusers_class}.from_pretrained("{repository or source}")',
            "```",
            "",
        ]
    if architecture:
        auto = "AutoModelForCausalLM" if task == "text-generation" else "AutoModelForMaskedLM"
        lines += [
            f"With transformers, whose class is `{architecture}`:",
            "",
            "```python",
            f"from transformers import {auto}, AutoTokenizer",
            "",
            f'model = {auto}.from_pretrained("{repository or source}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{repository or source}")',
            "```",
            "",
        ]
    return lines


def _training(meta: Mapping[str, Any], run: Mapping[str, Any], paths: list[str]) -> list[str]:
    data_text = ", ".join(_code(_public(path)) for path in paths) or "synthetic, made by jaxtrain"
    return [
        "| | |",
        "|---|---|",
        f"| config | {_code(_public(str(run.get('name'))))} |",
        f"| data | {data_text} |",
        f"| steps | {meta['step']:,} |",
        f"| examples seen | {meta['examples_seen']:,} |",
        "",
        "<details><summary>All fields of the config</summary>",
        "",
        "```json",
        json.dumps(_public(run), indent=1),
        "```",
        "",
        "</details>",
    ]


def _metrics(source: Path, meta: Mapping[str, Any]) -> list[str]:
    path = pointer.find(source)
    records = (source if path is None else pointer.run_of(path)) / line_files.METRICS
    values: dict[str, float] = {}
    for record in json_lines.read(records) if meta and records.is_file() else ():
        if record["step"] == meta["step"]:
            values |= {name: x for name, x in record.items() if name.startswith("val/")}
    if not values:
        return ["No validation of these parameters is recorded."]
    return [
        f"Measured by the run at step {meta['step']:,}, on its validation split.",
        "",
        "| metric | value |",
        "|---|---|",
        *(f"| {name} | {value:.5g} |" for name, value in values.items()),
    ]


def _trained_with(recorded: Mapping[str, str] | None) -> list[str]:
    if not recorded:
        return []
    packages = ", ".join(_code(f"{name} {number}") for name, number in recorded.items())
    return [f"Trained with {packages}.", ""]


def _code(text: str) -> str:
    """Returns text as code, which it cannot end."""
    return f"`{re.sub('[`|]', '?', one_line(text))}`"


def _paths(value: Any) -> list[str]:
    values = value if isinstance(value, list | tuple) else [value]
    return [path for path in values if isinstance(path, str)]


def _dataset(path: str) -> str:
    """Returns the name of a dataset on the Hub; "" for other data."""
    if not hub_datasets.is_named(path):
        return ""
    name = path.removeprefix(hub_datasets.PREFIX).partition(":")[0].partition("@")[0]
    return name if _DATASET.fullmatch(name) and not os.path.isdir(name) else ""


def _public(value: Any) -> Any:
    """Returns a value of a config with only the last part of each path and URL."""
    if isinstance(value, Mapping):
        return {name: _public(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item) for item in value]
    if not isinstance(value, str) or _dataset(value):
        return value
    if addresses.is_address(value):
        value = addresses.public(value).partition("?")[0]
    return one_line(PurePosixPath(value).name) if "/" in value else one_line(value)
