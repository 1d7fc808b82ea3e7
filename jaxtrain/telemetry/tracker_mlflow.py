"""Records a run with MLflow: metrics, parameters, and samples as images and artifacts.

A metric of MLflow has a step and a time; a repeated step adds a value with a later time.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import mlflow
from mlflow.entities import Metric, Param, RunTag
from PIL import Image

from jaxtrain import config
from jaxtrain.errors import DONE, INTERRUPTED, RUN_AGAIN
from jaxtrain.telemetry.samples import FOLDER
from jaxtrain.telemetry.tracker_process import PROJECT, Info, Row

# Limits of a request: https://mlflow.org/docs/latest/rest-api.html
_MOST_METRICS, _MOST_PARAMS, _LONGEST = 1000, 100, 6000
_TAG = "jaxtrain.run"
_STATUS = {DONE: "FINISHED", RUN_AGAIN: "KILLED", INTERRUPTED: "KILLED"}


class MLflow:
    """A run of MLflow, found by a tag.

    A request returns when the server has stored it, so all rows that were sent have arrived.

    Args:
        info: of the run.
    """

    def __init__(self, info: Info) -> None:
        self._client = mlflow.MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment()
        found = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{info.id}'")
        self.arrived = info.sent if found else 0
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {_TAG: info.id}
            run = self._client.create_run(experiment, tags=tags, run_name=info.name)
            self._id = run.info.run_id
        self._write_config(config.flat(info.config), found[0].data.params if found else {})
        uri = mlflow.get_tracking_uri()
        self.where = f"run {info.name} ({self._id}) at {uri}"

    def record(self, first: int, rows: Sequence[Row]) -> None:
        """Sends rows."""
        metrics = [
            Metric(name, value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics[start : start + _MOST_METRICS])
        for row in rows:
            for path in row.samples:
                self._sample(path, row)

    def close(self, code: int) -> None:
        """Ends the run."""
        self._client.set_terminated(self._id, _STATUS.get(code, "FAILED"))

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name)

    def _write_config(self, config: dict[str, object], known: dict[str, str]) -> None:
        """Writes the parameters. MLflow never changes one: a new value becomes a tag."""
        values = {name: str(value)[:_LONGEST] for name, value in config.items()}
        new = [Param(name, value) for name, value in values.items() if name not in known]
        for start in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[start : start + _MOST_PARAMS])
        changed = [
            RunTag(f"changed.{name}", value)
            for name, value in values.items()
            if known.get(name, value) != value
        ]
        self._client.log_batch(self._id, tags=changed)

    def _sample(self, path: Path, row: Row) -> None:
        if path.suffix == ".png":
            with Image.open(path) as image:
                name, when = path.stem.rpartition("_")[0], int(row.time * 1000)
                self._client.log_image(
                    self._id, image, key=name, step=row.step, timestamp=when, synchronous=True
                )
        else:
            self._client.log_artifact(self._id, str(path), FOLDER)
