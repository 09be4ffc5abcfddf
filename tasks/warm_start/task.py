"""Task: make policy version 0 by a warm start, or import it."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs.evaluate import HELD_OUT
from storage import layout
from storage.version_names import PolicyVersion, ProblemsVersion
from storage.versions import checkpoints, manifests
from tasks.agents.problem_checks import without_room
from tasks.problems.task import FIXED_SETS, TRAIN, read_problems
from tasks.run.workspace import Workspace
from tasks.warm_start.policy_sizes import lesson

_STEPS_PER_LINE = 100


@task(name="first-policy", cache_policy=NO_CACHE)
def first_policy(workspace: Workspace, sets: Sequence[ProblemsVersion] = ()) -> PolicyVersion:
    """Commit policy version 0, from which training starts, unless it exists; return its version.

    Args:
        workspace: of the run.
        sets: for training and held out, as `import_problems` returns them: the run keeps them from now on.

    Raises:
        ValueError: the path, URI or hub name holds no usable policy, or the policy does not fit the agent or the
            context length.
    """
    version = layout.checkpoint(workspace.name, 0)
    if manifests.committed(workspace.store, version):
        return version
    with TemporaryDirectory(prefix="policy-", dir=workspace.scratch) as scratch:
        folder, metrics, origin = Path(scratch), dict[str, Any](), None
        if workspace.config.policy.warm_start:
            metrics = _warm_start(workspace, folder)
        else:
            origin = _import(workspace, folder)
        _try_out(workspace, folder, sets)
        if sets:
            metrics[FIXED_SETS] = dict(zip((TRAIN, HELD_OUT), sets, strict=True))
        return _commit(workspace, version, folder, metrics, origin)


def _warm_start(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from tasks.warm_start.teach import make_policy

    config, logger = workspace.config, get_run_logger()
    assert config.policy.warm_start is not None
    taught, feedback = lesson(config)
    steps = config.policy.warm_start.steps

    def log_step(step: int, loss: float, accuracy: float) -> None:
        if step % _STEPS_PER_LINE == 0:
            logger.info("warm start: step %d of at most %d, loss %.3f, sampled right %.2f", step, steps, loss, accuracy)

    return dict(
        make_policy(
            config.policy.warm_start,
            taught,
            feedback,
            config.run.seed,
            folder,
            threads=config.ppo.threads,
            progress=log_step,
        )
    )


def _import(workspace: Workspace, folder: Path) -> str | None:
    """Import the policy; return the version that it comes from, if this store holds it."""
    from tasks.warm_start.importing import import_policy

    path = workspace.config.policy.path
    assert path is not None
    get_run_logger().info("importing the policy from %s", path)
    return import_policy(path, folder, workspace.cache, workspace.store)


def _try_out(workspace: Workspace, folder: Path, sets: Sequence[ProblemsVersion]) -> None:
    """Check the policy before the commit, so errors of the first rollout show before anything is committed."""
    from tasks.warm_start.importing import try_out

    chat = try_out(folder, workspace.config)
    for problem_set in sets:
        without_room(read_problems(workspace, problem_set), chat, workspace.config)


def _commit(
    workspace: Workspace, version: PolicyVersion, model: Path, metrics: dict[str, Any], origin: str | None
) -> PolicyVersion:
    from tasks.train.policy import load_policy, make_canary

    ppo = workspace.config.ppo
    if ppo.parallel.ranks > 1:  # the model may not fit one GPU
        ppo = ppo.model_copy(update={"device": "cpu"})
    canary = make_canary(load_policy(model, ppo))
    parents = [layout.run(workspace.name), *([origin] if origin else [])]
    checkpoints.commit(workspace.store, version, model, None, canary, workspace.provenance(), parents, metrics)
    return version
