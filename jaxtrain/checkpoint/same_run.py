"""Refuses to resume with other data, another seed, or another meaning of the parameters."""

from collections.abc import Mapping
from typing import Any

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.models import from_file
from jaxtrain.storage import addresses
from jaxtrain.terminal import Say

_FILES_TO_NAME = 5


def check_same_run(
    source: str,
    saved: Mapping[str, Any],
    *,
    model: Any,
    fingerprint: str,
    settings: Mapping[str, Any],
    versions: Mapping[str, str],
    code: Mapping[str, str],
    say: Say,
) -> None:
    """The checkpoint must have this run's order of examples; prints other differences.

    Other code does not prevent a resume: to fix a model is often why a run resumes.

    Raises:
        InputError: the data, the seed or the meaning of the parameters differ.
    """
    saved = addresses.scrubbed(dict(saved))
    old = saved["config"]
    if saved["fingerprint"] != fingerprint:
        raise InputError(
            f"{source} was trained on different data ({_data_of(old, saved['fingerprint'])}) "
            f"than "
            f"this run ({_data_of(settings, fingerprint)}), so the order of examples would differ: "
            f"pass the same --config and --data.path{_same_clips(old['data'], settings['data'])}, "
            "or start a new run"
        )
    if old["seed"] != settings["seed"]:
        raise InputError(
            f"{source} was trained with seed {old['seed']}, and this run has seed "
            f"{settings['seed']}, so the order of examples would differ: omit --seed"
        )
    frozen = [sorted(set(recorded["model"].get("freeze", ()))) for recorded in (old, settings)]
    if frozen[0] != frozen[1]:
        raise InputError(
            f"{source} was trained with model.freeze={' '.join(frozen[0]) or '()'}, and this "
            f"run has {' '.join(frozen[1]) or '()'}, so the optimizer states differ: pass the same "
            f"--model.freeze, or start a new run with --model.init_from {source}"
        )
    for difference in config.differences(old, settings):
        say(f"differs from the checkpoint: {difference}")
    for difference in config.differences(saved["versions"], versions):
        say(f"version differs from the checkpoint: {difference}")
    if edited := _edited(saved.get("code", {}), code):
        say(f"code differs from the checkpoint: {edited}")
    from_file.check_not_in_weights(model, old["model"], source)


def check_file_weights(source: str, saved: Mapping[str, str], of_files: Mapping[str, str]) -> None:
    """Checks the weights that a model reads from files and does not train.

    Args:
        saved: part of the model -> checksum of its values, from the metadata.

    Raises:
        InputError: names the first part whose values differ.
    """
    for part in sorted({*saved, *of_files}):
        saved_sum, file_sum = (
            sums[part][:8] if part in sums else "none" for sums in (saved, of_files)
        )
        if saved.get(part) != of_files.get(part):
            raise InputError(
                f"{source} was trained with other values of {part} (checksum {saved_sum}) than "
                f"this config's files have ({file_sum}): pass the files that the run started with, "
                "which its config.json names"
            )


def _edited(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Returns the source files that have changed, or are there only once; "" if none has."""
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    more = len(names) - _FILES_TO_NAME
    return ", ".join(names[:_FILES_TO_NAME]) + (f", and {more} more" if more > 0 else "")


def _data_of(settings: Mapping[str, Any], fingerprint: str) -> str:
    data = settings["data"]
    val = "" if data.get("val_path") is None else f" --data.val_path {data['val_path']}"
    return (
        f"--config {settings['name']} --data.path {data.get('path')}{val}, fingerprint "
        f"{fingerprint[:8]}"
    )


def _same_clips(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if old.get("clips_per_video") == new.get("clips_per_video"):
        return ""
    return f" and --data.clips_per_video {old.get('clips_per_video')}"
