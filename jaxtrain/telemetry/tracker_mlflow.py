"""Records a run with MLflow: metrics, parameters, and samples as images and artifacts."""

import logging
import os

import mlflow
from mlflow.entities import Metric, Param, RunTag
from PIL import Image

from jaxtrain import config
from jaxtrain.errors import DONE, INTERRUPTED, RUN_AGAIN
from jaxtrain.telemetry.recorder import PROJECT, Info, Row
from jaxtrain.telemetry.samples import FOLDER

# Limits of a request: https://mlflow.org/docs/latest/rest-api.html
_MOST_PARAMS, _LONGEST = 100, 6000
_TAG = "jaxtrain.run"
_STATUS = {DONE: "FINISHED", RUN_AGAIN: "KILLED", INTERRUPTED: "KILLED"}


class MLflow:
    """A run of MLflow, found by a tag."""

    keeps = True  # a request returns when the server has stored it

    def __init__(self, info: Info) -> None:
        for library in ("alembic", "mlflow"):  # they report each table of a new database
            logging.getLogger(library).setLevel(logging.WARNING)
        self._client = mlflow.MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment()
        runs = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{info.id}'")
        self.last = info.sent if runs else -1
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {_TAG: info.id}
            run = self._client.create_run(experiment, tags=tags, run_name=info.name)
            self._id = run.info.run_id
        self._write_config(config.flat(info.config), runs[0].data.params if runs else {})
        self.destination = f"run {info.name} ({self._id}) at {mlflow.get_tracking_uri()}"

    def record(self, row: Row) -> None:
        """Sends a row. MLflow ignores a metric that it has with the same step and time."""
        when = int(row.time * 1000)
        metrics = [Metric(name, value, when, row.step) for name, value in row.values.items()]
        self._client.log_batch(self._id, metrics)
        for name, path in row.samples.items():
            if path.suffix == ".png":
                with Image.open(path) as image:
                    self._client.log_image(
                        self._id, image, key=name, step=row.step, timestamp=when, synchronous=True
                    )
            else:
                self._client.log_artifact(self._id, str(path), FOLDER)

    def close(self, code: int) -> None:
        """Ends the run."""
        self._client.set_terminated(self._id, _STATUS.get(code, "FAILED"))

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        return experiment.experiment_id if experiment else self._client.create_experiment(name)

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
