"""The config of a run in TensorBoard; test_events.py covers metrics and samples."""

import time
from pathlib import Path
from typing import Any

import pytest
from telemetry import event_log, tensorboard_events
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from jaxtrain import config
from jaxtrain.telemetry import tensorboard
from jaxtrain.telemetry.events import Metrics, Rewound


def hyperparameters(directory: Path) -> dict[str, Any]:
    """Returns the hyperparameters of a run as TensorBoard reads them: from the first such event."""
    for event in tensorboard_events.events(directory):
        for value in event.summary.value:
            if value.tag == "_hparams_/session_start_info":
                assert value.metadata.plugin_data.plugin_name == "hparams"
                data = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                assert data.version == 0
                found = data.session_start_info.hparams
                return {name: getattr(one, one.WhichOneof("kind")) for name, one in found.items()}
    raise AssertionError("no hyperparameters")


def test_every_field_is_written_under_its_full_name(tmp_path: Path) -> None:
    values = config.flat(config.to_dict(config.named("demo_gpt")))
    tensorboard.write_config(tmp_path / "tensorboard", values)
    found = hyperparameters(tmp_path)
    assert found.keys() == values.keys()
    assert found["optim.peak_lr"] == values["optim.peak_lr"]
    assert found["name"] == "demo_gpt"
    assert found["deterministic"] is False
    assert found["data.path"] == "null"
    assert found["data.weights"] == "[]"


def test_a_changed_config_replaces_the_older_one(tmp_path: Path) -> None:
    """Even if records were written in between, which must not purge it."""
    log = event_log.attached(tmp_path, 0, 1)
    for rate in (0.5, 0.25):
        tensorboard.write_config(tmp_path / "tensorboard", {"optim.peak_lr": rate})
        log.emit(Metrics(1, {"train/loss": rate}))
        log.emit(Rewound(0, 0))
    log.close()
    assert hyperparameters(tmp_path) == {"optim.peak_lr": 0.25}
    first = tensorboard_events.events(tmp_path)[0]
    assert first.file_version == "brain.Event:2"
    assert tensorboard_events.scalars(tmp_path) == [
        (1, "train/loss", 0.5),
        (1, "train/loss", 0.25),
    ]


def test_a_later_start_has_a_later_name_although_the_clock_went_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorboard.write_config(tmp_path / "tensorboard", {})
    for number, now in enumerate((1_800_000_000, 1_800_000_000, 1_700_000_000, 1_900_000_000)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        sink = tensorboard.TensorBoard(tmp_path)
        sink.handle(Metrics(step=number, values={"val/a": float(number)}))
        sink.close()
    in_order_of_names = tensorboard_events.scalars(tmp_path)
    assert [value for _, _, value in in_order_of_names] == [0, 1, 2, 3]
