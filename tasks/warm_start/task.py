"""Task: make policy version 0 by a warm start, or import it."""

from pathlib import Path
from tempfile import TemporaryDirectory

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from storage import layout
from storage.version_names import PolicyVersion
from storage.versions import checkpoints, manifests
from tasks.run.workspace import Workspace
from tasks.warm_start.policy_sizes import lesson

_STEPS_PER_LINE = 100


@task(name="first-policy", cache_policy=NO_CACHE)
def first_policy(workspace: Workspace) -> PolicyVersion:
    """Commit policy version 0, from which training starts, unless it exists; return its version.

    Raises:
        ValueError: the path, URI or hub name holds no usable policy, or the policy does not fit the agent or the
            context length.
    """
    version = layout.checkpoint(workspace.name, 0)
    if manifests.committed(workspace.store, version):
        return version
    with TemporaryDirectory(prefix="policy-", dir=workspace.scratch) as scratch:
        folder, metrics, origin = Path(scratch), dict[str, float](), None
        if workspace.config.policy.warm_start:
            metrics = _warm_start(workspace, folder)
        else:
            origin = _import(workspace, folder)
        _try_out(workspace, folder)
        return _commit(workspace, version, folder, metrics, origin)


def _warm_start(workspace: Workspace, folder: Path) -> dict[str, float]:
    from tasks.warm_start.teach import make_policy

    config, logger = workspace.config, get_run_logger()
    assert config.policy.warm_start is not None
    taught, feedback = lesson(config)
    steps = config.policy.warm_start.steps

    def log_step(step: int, loss: float, accuracy: float) -> None:
        if step % _STEPS_PER_LINE == 0:
            logger.info("warm start: step %d of at most %d, loss %.3f, sampled right %.2f", step, steps, loss, accuracy)

    return make_policy(
        config.policy.warm_start,
        taught,
        feedback,
        config.run.seed,
        folder,
        threads=config.ppo.threads,
        progress=log_step,
    )


def _import(workspace: Workspace, folder: Path) -> str | None:
    """Import the policy; return the version that it comes from, if this store holds it."""
    from tasks.warm_start.importing import import_policy

    path = workspace.config.policy.path
    assert path is not None
    get_run_logger().info("importing the policy from %s", path)
    return import_policy(path, folder, workspace.cache, workspace.store)


def _try_out(workspace: Workspace, folder: Path) -> None:
    """Check the policy before the commit, so errors of the first rollout show before anything is committed."""
    from tasks.warm_start.tryout import try_out

    try_out(folder, workspace.config)


def _commit(
    workspace: Workspace, version: PolicyVersion, model: Path, metrics: dict[str, float], origin: str | None
) -> PolicyVersion:
    from tasks.train.policy import load_policy, make_canary

    ppo = workspace.config.ppo
    if ppo.parallel.ranks > 1:  # the model may not fit one GPU
        ppo = ppo.model_copy(update={"device": "cpu"})
    canary = make_canary(load_policy(model, ppo), ppo.logprob_chunk_tokens)
    parents = [layout.run(workspace.name), *([origin] if origin else [])]
    checkpoints.commit(workspace.store, version, model, None, canary, workspace.provenance(), parents, metrics)
    return version
