"""Tests what a resume refuses because it would not continue the same run."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from jaxtrain import config, versions
from jaxtrain.checkpoint import same_run
from jaxtrain.errors import InputError

RUN = config.named("demo_mlm")


def described(run: config.Run, fingerprint: str) -> dict[str, Any]:
    """Returns a checkpoint's metadata, as far as :func:`same_run.check_same_run` reads it."""
    return {
        "fingerprint": fingerprint,
        "config": config.to_dict(run),
        "versions": versions.versions(),
        "code": {"jaxtrain/sharding.py": "1", "my_model.py": "2"},
    }


def check_same_run(saved: dict[str, Any], now: dict[str, Any], say: Callable[[str], None]) -> None:
    same_run.check_same_run(
        "4",
        saved,
        model=RUN.model,
        fingerprint=now["fingerprint"],
        settings=now["config"],
        versions=now["versions"],
        code=now["code"],
        say=say,
    )


@pytest.mark.parametrize(
    ("change", "named"), [({"seed": 7}, "seed 7"), ({}, "fingerprint other"), (None, None)]
)
def test_a_resume_rejects_another_seed_or_other_data(
    change: dict[str, Any] | None, named: str | None
) -> None:
    saved = described(RUN, "other" if change == {} else "same")
    now = described(dataclasses.replace(RUN, **(change or {})), "same")
    if named is None:
        check_same_run(saved, now, print)
        return
    with pytest.raises(InputError, match=named):
        check_same_run(saved, now, print)


@pytest.mark.parametrize("clips", [1, None])
def test_a_resume_with_other_clips_per_video_prints_the_original_flag(clips: int | None) -> None:
    run = config.load("h100_8", ["--data.clips_per_video", "6"])
    now, saved = described(run, "now"), described(run, "then")
    data = saved["config"]["data"] | {"clips_per_video": clips}
    saved["config"] = saved["config"] | {"data": data}
    named = f"pass the same --config and --data.path and --data.clips_per_video {clips}, or"
    with pytest.raises(InputError, match=re.escape(named)):
        check_same_run(saved, now, print)


def test_a_resume_with_other_frozen_parts_is_refused() -> None:
    """The checkpoint's optimizer state has other parameters; older ones froze nothing."""
    run = config.load("h100_8", ["--model.freeze", "encoder"])
    now, saved = described(run, "same"), described(run, "same")
    check_same_run(saved, now, print)
    model = {k: v for k, v in saved["config"]["model"].items() if k != "freeze"}
    saved["config"] = saved["config"] | {"model": model}
    with pytest.raises(InputError, match=r"model\.freeze=\(\), and this run has encoder, so"):
        check_same_run(saved, now, print)


def test_different_versions_are_printed() -> None:
    saved, now = described(RUN, "same"), described(RUN, "same")
    saved["versions"] = saved["versions"] | {"grain": "0.0.1"}
    said: list[str] = []
    check_same_run(saved, now, said.append)
    assert [line.partition(" -> ")[0] for line in said] == [
        "version differs from the checkpoint: grain: 0.0.1"
    ]


def test_edited_code_is_named_and_never_refused() -> None:
    saved, now = described(RUN, "same"), described(RUN, "same")
    now["code"] = {"jaxtrain/sharding.py": "1", "my_model.py": "3", "helper.py": "4"}
    said: list[str] = []
    check_same_run(saved, now, said.append)
    assert said == ["code differs from the checkpoint: helper.py, my_model.py"]
