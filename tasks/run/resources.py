"""What the stages share for the length of a flow: engine, verifier and trainer.

Each is a context manager; heavy libraries are imported when one is opened.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tasks.run.workspace import Workspace

if TYPE_CHECKING:
    from tasks.inference.engine import Engine
    from tasks.score.verifier import Verifier
    from tasks.train.trainer import Trainer


@contextmanager
def open_engine(workspace: Workspace) -> Iterator["Engine"]:
    """vLLM; its servers start when a policy is first served, and have ended when the block is left."""
    from tasks.inference.engine import Engine

    config = workspace.config
    with Engine(config.inference, config.rollout, workspace.cache / "logs" / workspace.name) as engine:
        yield engine


@contextmanager
def open_verifier(workspace: Workspace) -> Iterator["Verifier"]:
    """The judge's processes and cache."""
    from tasks.score.verifier import Verifier

    score = workspace.config.score
    with Verifier(score.workers, score.timeout_s, score.memory_mb) as verifier:
        yield verifier


@contextmanager
def open_trainer(workspace: Workspace) -> Iterator["Trainer"]:
    """The policy that learns; it stays in memory between iterations."""
    from tasks.train.trainer import Trainer

    config = workspace.config
    oldest = config.rollout.max_head_offpolicyness
    yield Trainer(config.ppo, config.optimizer, config.reward, config.sampling.temperature, oldest)
