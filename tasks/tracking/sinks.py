"""The trackers of four packages, each of which is imported when it is used."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.tracking.points import Histogram, Point, TrackedRun

PROJECT = "math-mt-ppo"
"""The project or experiment, unless the tracker's own environment variable names another."""
_COLUMNS = ["trajectory", "problem", "transcript", "verdicts", "reward"]  # of `Transcript`


class Tensorboard:
    """TensorBoard: event files in the cache, `tensorboard --logdir <storage.cache>/tracking/tensorboard`."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.folder / "tensorboard" / f"{run.name}-{run.key[:6]}"
        for old in folder.glob("events.out.tfevents.*"):  # all points come again; readers order files by their names
            old.unlink(missing_ok=True)
        self._event, self._summary, self._writer = Event, Summary, EventFileWriter(str(folder))
        self._writer.add_event(Event(session_log=SessionLog(status=SessionLog.START)))  # readers forget what they have
        self._write(0, 0.0, {"config": "\n".join(f"{k}: {v}" for k, v in run.config.items())}, [])

    def log(self, point: Point) -> None:
        values = [self._summary.Value(tag=name, simple_value=number) for name, number in point.numbers.items()]
        values += [self._histogram(name, each) for name, each in point.histograms.items()]
        texts = {"versions": "\n".join(f"{stage}: {uri}" for stage, uri in point.versions.items())}
        for number, each in enumerate(point.transcripts):
            texts[f"transcripts/{number}"] = f"{each.trajectory_id}: {each.verdicts}\n\n{each.problem}\n\n{each.text}"
        self._write(point.step, point.at, texts, values)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, at: float, texts: Mapping[str, str], values: Sequence[Any]) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        blocks = {name: "    " + text.replace("\n", "\n    ") for name, text in texts.items()}  # it shows Markdown
        shown = [text_pb(name, block).value[0] for name, block in blocks.items()]
        self._writer.add_event(self._event(step=step, wall_time=at, summary=self._summary(value=[*values, *shown])))

    def _histogram(self, name: str, histogram: Histogram) -> Any:
        import numpy as np
        from tensorboard.plugins.histogram.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        rows = np.column_stack([histogram.edges[:-1], histogram.edges[1:], histogram.counts])
        metadata = create_summary_metadata(display_name=None, description=None)
        return self._summary.Value(tag=f"histogram/{name}", metadata=metadata, tensor=make_tensor_proto(rows))


class _ByStep:
    """The part that W&B and trackio share. They keep what is logged with another step than before."""

    def __init__(self, package: Any, run: Any, known: int) -> None:
        self._package, self._run = package, run
        self._known = known  # points below it are there: the run was resumed

    def log(self, point: Point) -> None:
        if point.index < self._known:
            return
        values: dict[str, Any] = {**point.numbers, "iteration": point.step}
        values |= {f"versions/{stage}": uri for stage, uri in point.versions.items()}
        for name, each in point.histograms.items():
            histogram = list(each.counts), list(each.edges)
            values[f"histogram/{name}"] = self._package.Histogram(np_histogram=histogram)
        if point.transcripts:
            rows = [list(each) for each in point.transcripts]
            values["transcripts"] = self._package.Table(columns=_COLUMNS, data=rows)
        self._run.log(values, step=point.index)

    def close(self) -> None:
        self._run.finish()


class Wandb(_ByStep):
    """Weights & Biases; `WANDB_API_KEY`, `WANDB_MODE=offline`, `WANDB_PROJECT` … are its own variables.

    Offline, each process writes a file with all points.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        made = wandb.init(
            project=project, id=run.key, name=run.name, resume="allow", dir=run.folder, config=dict(run.config),
            settings=wandb.Settings(  # nothing but what `tasks/tracking/README.md` lists
                console="off", disable_git=True, disable_code=True, x_disable_stats=True, x_disable_meta=True
            ),
        )  # fmt: skip
        made.config.update({"store": run.uri}, allow_val_change=True)
        made.define_metric("*", step_metric="iteration")
        super().__init__(wandb, made, made.step)


class Trackio(_ByStep):
    """Trackio, on this machine unless `TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID` names another place."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        made = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=f"{run.name}-{run.key[:6]}", resume="allow",
            config={**run.config, "store": run.uri}, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        super().__init__(trackio, made, made._next_step)


class Mlflow:
    """MLflow: `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME` … are its own variables."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_ALLOW_HTTP_REDIRECTS", "false")
        from mlflow import MlflowClient, set_experiment
        from mlflow.entities import Param

        self._client = MlflowClient()
        number = set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)).experiment_id
        known = self._client.search_runs([number], f"tags.`math-mt-ppo.key` = '{run.key}'")
        tags = {"math-mt-ppo.key": run.key, "store": run.uri}
        found = known[0] if known else self._client.create_run(number, run_name=run.name, tags=tags)
        self._id: str = found.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        params = [Param(key, str(value)[:500]) for key, value in run.config.items()]
        for start in range(0, len(params), 100):  # the server's limit; it accepts equal ones again
            self._client.log_batch(self._id, params=params[start : start + 100])
        self._known = {file.path for file in self._client.list_artifacts(self._id, "points")}

    def log(self, point: Point) -> None:
        from dataclasses import asdict

        from mlflow.entities import Metric

        place, is_update = f"points/{point.index:06d}.json", point.index % 2
        if is_update and place in self._known:  # evaluations are logged again: further sets may have come
            return
        # After a kill the server keeps one of two equal metrics: value, time and step follow from what was committed.
        metrics = [
            Metric(re.sub(r"[^\w\-. :/]", "_", name), number, int(1000 * point.at), point.step)
            for name, number in point.numbers.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)
        if point.transcripts:
            table = {"columns": _COLUMNS, "data": [list(each) for each in point.transcripts]}
            self._client.log_dict(self._id, table, f"transcripts/{point.step:06d}.json")
        details = {"versions": dict(point.versions), "histograms": {k: asdict(v) for k, v in point.histograms.items()}}
        self._client.log_dict(self._id, details, place)

    def close(self) -> None:
        self._client.set_terminated(self._id)
