"""The trackers of four packages, each of which is imported when it is used."""

import os
import re
from collections.abc import Sequence
from typing import Any

from tasks.tracking.interface import Histogram, Point, TrackedRun, Transcript

PROJECT = "math-mt-ppo"
"""The project or experiment, unless the tracker's own environment variable names another."""
_COLUMNS = ("trajectory", "problem", "transcript", "verdicts", "reward")


def _cells(transcripts: Sequence[Transcript]) -> list[list[Any]]:
    return [[each.trajectory_id, each.problem, each.text, each.verdicts, each.reward] for each in transcripts]


def _values(point: Point, histogram: Any) -> dict[str, Any]:
    """Return a point as W&B and trackio take it; `histogram` is their class."""
    values: dict[str, Any] = {**point.numbers, "iteration": point.step}
    values |= {f"versions/{stage}": uri for stage, uri in point.versions.items()}
    for name, each in point.histograms.items():
        values[f"histogram/{name}"] = histogram(np_histogram=(list(each.counts), list(each.edges)))
    return values


def _markdown(point: Point) -> dict[str, str]:
    """Return texts for trackers that show Markdown: where the versions are, and the transcripts."""
    texts = {"versions": "\n".join(f"- {stage}: `{uri}`" for stage, uri in point.versions.items())}
    if point.transcripts:
        fenced = [f"**{each.trajectory_id}** ({each.verdicts})\n\n    {each.problem}\n\n" for each in point.transcripts]
        bodies = ["    " + each.text.replace("\n", "\n    ") for each in point.transcripts]
        texts["transcripts"] = "\n\n".join(head + body for head, body in zip(fenced, bodies, strict=True))
    return texts


class Tensorboard:
    """TensorBoard: event files in the cache, `tensorboard --logdir <storage.cache>/tracking/tensorboard`."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard" / f"{run.name}-{run.key[:6]}"
        if run.first == 0:  # all points come again, so that no reader sees one twice
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
        self._event, self._writer = Event, EventFileWriter(str(folder))
        if run.first == 0:
            self._write(0, 0.0, [self._text("config", "\n".join(f"    {k}: {v}" for k, v in run.config.items()))])

    def log(self, point: Point) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=number) for name, number in point.numbers.items()]
        values += [self._text(name, text) for name, text in _markdown(point).items()]
        values += [self._histogram(name, each) for name, each in point.histograms.items()]
        self._write(point.step, point.at, values)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, at: float, values: Sequence[Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(self._event(step=step, wall_time=at, summary=Summary(value=values)))

    def _text(self, name: str, text: str) -> Any:
        from tensorboard.plugins.text.summary_v2 import text_pb

        return text_pb(name, text).value[0]

    def _histogram(self, name: str, histogram: Histogram) -> Any:
        import numpy as np
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.histogram.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        rows = np.column_stack([histogram.edges[:-1], histogram.edges[1:], histogram.counts])
        metadata = create_summary_metadata(display_name=None, description=None)
        return Summary.Value(tag=f"histogram/{name}", metadata=metadata, tensor=make_tensor_proto(rows))


class Wandb:
    """Weights & Biases; `WANDB_API_KEY`, `WANDB_MODE=offline`, `WANDB_PROJECT` … are its own variables."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        run.folder.mkdir(parents=True, exist_ok=True)
        self._wandb, self._run = wandb, wandb.init(
            project=project, id=run.key, name=run.name, resume="allow", dir=run.folder, config=dict(run.config),
            settings=wandb.Settings(  # nothing but what `tasks/tracking/README.md` lists
                console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
            ),
        )  # fmt: skip
        self._run.config.update({"store": run.uri}, allow_val_change=True)
        self._run.define_metric("*", step_metric="iteration")

    def log(self, point: Point) -> None:
        if point.index < self._run.step:  # it was resumed, and has this one; offline it begins another file with all
            return
        values = _values(point, self._wandb.Histogram)
        if point.transcripts:
            values["transcripts"] = self._wandb.Table(columns=list(_COLUMNS), data=_cells(point.transcripts))
        self._run.log(values, step=point.index)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio, on this machine unless `TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID` names another place."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        config = {**run.config, "store": run.uri}
        self._trackio = trackio
        self._run = trackio.init(
            project=project,
            name=f"{run.name}-{run.key[:6]}",
            resume="allow",
            config=config,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._known: int = self._run._next_step  # of a run that it resumed; it would keep two points of one step

    def log(self, point: Point) -> None:
        if point.index < self._known:
            return
        values = _values(point, self._trackio.Histogram)
        if point.transcripts:
            frame = [dict(zip(_COLUMNS, row, strict=True)) for row in _cells(point.transcripts)]
            values["transcripts"] = self._trackio.Table(data=frame)
        self._run.log(values, step=point.index)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow: `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME` … are its own variables."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([number], f"tags.`math-mt-ppo.key` = '{run.key}'")
        tags = {"math-mt-ppo.key": run.key, "store": run.uri}
        found = known[0] if known else self._client.create_run(number, run_name=run.name, tags=tags)
        self._id: str = found.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        params = [Param(key, str(value)[:500]) for key, value in run.config.items()]
        for start in range(0, len(params), 100):  # the server's limit; it accepts equal ones again
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, point: Point) -> None:
        from dataclasses import asdict

        from mlflow.entities import Metric

        # The server keeps one of two equal metrics: value, time and step follow from what was committed.
        at = int(1000 * point.at)
        metrics = [Metric(_allowed(name), number, at, point.step) for name, number in point.numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)
        details = {"versions": dict(point.versions), "histograms": {k: asdict(v) for k, v in point.histograms.items()}}
        self._client.log_dict(self._id, details, f"points/{point.index:06d}.json")
        if point.transcripts:
            table = {"columns": list(_COLUMNS), "data": _cells(point.transcripts)}
            self._client.log_dict(self._id, table, f"transcripts/{point.step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _allowed(name: str) -> str:
    """Return the name of a metric with the characters that MLflow knows."""
    return re.sub(r"[^\w\-. :/]", "_", name)
