"""Reads and writes folders of transformers and diffusers: config.json and .safetensors files.

``AutoModelForMaskedLM.from_pretrained`` or ``AutoModelForCausalLM.from_pretrained``, and
``AutoTokenizer.from_pretrained``, load the folders of :func:`write`, which have a tokenizer;
diffusers' model class loads those of :func:`write_diffusers`. Theirs are read here.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import errors
from jaxtrain.data.text import transformers_files
from jaxtrain.errors import InputError, first_line
from jaxtrain.models import from_file
from jaxtrain.storage import atomic, tensor_files

SETTINGS = transformers_files.SETTINGS
CARD = "README.md"
_SETTINGS_BYTES = 2**24  # the largest known have some 100 KB of labels
ARRAYS = "model.safetensors"
INDEX = ARRAYS + tensor_files.INDEX
_PYTORCH = "pytorch_model.bin"
_DIFFUSERS = "diffusion_pytorch_model.safetensors"
AUTOENCODER = "vae"
"""The autoencoder's folder in that of a pipeline of diffusers."""
_KINDS = ("model_type", "_class_name")
"""The entry of config.json that names the model, in transformers and in diffusers."""
_WRITTEN = {SETTINGS, CARD, ARRAYS, _DIFFUSERS, "tokenizer.json", *transformers_files.FILES}
_IDS = ("pad", "bos", "eos")
"""Special tokens whose ids config.json has, and [CLS] and [SEP] of masked models: transformers
assumes those of a published model for some that are missing."""
_CAUSAL = "ForCausalLM"  # suffix of architectures whose tokenizers only mark beginnings


def is_model_folder(path: Path) -> bool:
    """Whether a path is a folder of a model; the config.json of a run directory is different."""
    if not (path / SETTINGS).is_file():
        return False
    try:
        content = atomic.read_json(path / SETTINGS, _SETTINGS_BYTES)
    except (OSError, ValueError):
        return False
    return any(kind in content for kind in _KINDS)


def model(folder: Path) -> Any:
    """Returns jaxtrain's config of the model in a folder."""
    path = folder / SETTINGS
    try:
        content = atomic.read_json(path, _SETTINGS_BYTES)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {first_line(error)}") from error
    entry = next((kind for kind in _KINDS if kind in content), _KINDS[0])
    kind = content.get(entry)
    # The name is only compared with those of known models; it never selects a module to import.
    known = {
        name: candidate
        for _, candidate in from_file.configs()
        if (name := candidate.model_type if entry == _KINDS[0] else candidate.diffusers_class)
    }
    if not isinstance(kind, str) or kind not in known:
        kind_text = errors.short_repr(kind)
        raise InputError(
            f"{path}: unknown {entry} {kind_text}; use one of {', '.join(sorted(known))}"
        )
    return known[kind].from_settings(content, str(path))


def tensors(folder: Path) -> tensor_files.Tensors:
    """Reads all arrays of a folder, as float32."""
    paths = tensor_files.of_folder(folder, ARRAYS) or tensor_files.of_folder(folder, _DIFFUSERS)
    if not paths and (folder / _PYTORCH).is_file():
        paths = [folder / _PYTORCH]
    if not paths:
        diffusers = _KINDS[1] in atomic.read_json(folder / SETTINGS, _SETTINGS_BYTES)
        lacks = f"no {_DIFFUSERS}" if diffusers else f"neither {ARRAYS} nor {_PYTORCH}"
        raise InputError(
            f"{folder} has {lacks}: download the complete folder, or pass a weights file"
        )
    arrays: tensor_files.Tensors = {}
    for path in paths:
        arrays |= tensor_files.read(path)[0]
    return arrays


def check_target(folder: Path) -> None:
    """Refuses a folder that cannot be written to, or that has other files."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    others = sorted(names - _WRITTEN) if is_model_folder(folder) else sorted(names)
    if others:
        raise InputError(f"{folder} has other files, such as {others[0]}: choose a new folder")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: choose a new folder")
    above = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    atomic.check_writable("DIR", above / SETTINGS)


def write(
    folder: Path,
    model: Any,
    params: Mapping[str, np.ndarray],
    tokenizer: Any,
    source: Path | None = None,
) -> int:
    """Writes a model and its tokenizer; each file is replaced atomically, config.json last.

    An existing config.json is deleted first, so that an incomplete folder is not taken for a model.

    Args:
        source: the ``tokenizer.json`` that it was read from; what belongs to it is written, too.
    """
    from jaxtrain.data.text import tokenizer as tokenizers

    tokenizers.check_size(tokenizer, model.vocab_size, "the tokenizer")
    kept = None if source is None else transformers_files.beside(source)
    settings = model.to_settings()
    causal = settings["architectures"][0].endswith(_CAUSAL)
    ids = {} if causal and kept else _special_ids(tokenizer, None if causal else model.pad_id)
    written = _IDS if causal else (*_IDS, "cls", "sep")
    kept_ids = {} if kept is None else kept.ids
    for name in written:  # in one order, so that an export of an import has the same bytes
        if (entry := f"{name}_token_id") in kept_ids or name in ids or kept is None:
            settings[entry] = kept_ids.get(entry, ids.get(name))
    settings |= kept_ids
    if source is None or kept is None:
        tokens = {f"{name}_token": tokenizer.id_to_token(number) for name, number in ids.items()}
        described = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.sequence_length,
            "clean_up_tokenization_spaces": False,
            "model_input_names": _inputs(settings),
            **tokens,
        }
        files = {
            tokenizers.NAME: tokenizer.to_str(),
            transformers_files.TOKENIZER: _json(described),
            transformers_files.SPECIALS: _json(tokens),
        }
    else:
        files = {tokenizers.NAME: source.read_bytes(), **kept.files}
        if kept.positions != model.sequence_length and transformers_files.TOKENIZER in files:
            described = json.loads(files[transformers_files.TOKENIZER])
            described["model_max_length"] = model.sequence_length
            files[transformers_files.TOKENIZER] = _json(described)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).unlink(missing_ok=True)
    tensors = model.to_transformers(params)
    tensor_files.write(folder / ARRAYS, tensors, {})
    for name in transformers_files.FILES:
        (folder / name).unlink(missing_ok=True)
    for name, content in (files | {SETTINGS: _json(settings)}).items():
        atomic.write_whole(folder / name, content)
    return sum(tensor.size for tensor in tensors.values())


def write_diffusers(folder: Path, model: Any, params: Mapping[str, np.ndarray]) -> int:
    """Writes a model for diffusers, as :func:`write` does; returns the number of elements."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).unlink(missing_ok=True)
    tensors = model.to_transformers(params)
    tensor_files.write(folder / _DIFFUSERS, tensors, {"format": "pt"})
    atomic.write_whole(folder / SETTINGS, _json(model.to_settings()))
    return sum(tensor.size for tensor in tensors.values())


def _inputs(settings: Mapping[str, Any]) -> list[str]:
    """Returns what a tokenizer makes for a model.

    Without this entry, transformers 4 makes token types for each model, which those without them
    refuse.
    """
    types = ["token_type_ids"] if "type_vocab_size" in settings else []
    return ["input_ids", *types, "attention_mask"]


def _json(content: Any) -> str:
    return json.dumps(content, indent=2) + "\n"


def _special_ids(tokenizer: Any, pad_id: int | None) -> dict[str, int]:
    """Returns the ids of the special tokens, by their names in transformers.

    Args:
        pad_id: the model's padding; None for a causal model, where one token marks the beginning of
            a document and thereby the end of the previous one.
    """
    from jaxtrain.data.text import specials

    if pad_id is None:
        return dict.fromkeys(("bos", "eos"), specials.begin(tokenizer, "the tokenizer"))
    special = specials.find(tokenizer, "the tokenizer")
    specials.check_padding(special, pad_id, "the tokenizer")
    return {name: getattr(special, name) for name in ("pad", "unk", "cls", "sep", "mask")}
