"""Trackers: TensorBoard, Weights & Biases, MLflow, trackio, or one's own, fed from what a run has committed.

A tracker gets points by the protocol `Sink` (both in `points`); `sinks` has those of the packages. `follow` feeds
them from the store alone, in a process of its own beside a flow, or afterwards (`python -m flows.track`).
"""

from tasks.registry import Registry
from tasks.tracking.points import Sink

SINKS = Registry[Sink]("tracking", key="tracking")
for _name in ("tensorboard", "wandb", "mlflow", "trackio"):
    SINKS.register(_name, f"tasks.tracking.sinks:{_name.capitalize()}")
