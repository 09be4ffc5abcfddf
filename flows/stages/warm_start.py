"""Task: import policy version 0, or take it over from a checkpoint of another run."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs import Config, algorithms, evaluate
from configs.problems import StoredSource
from flows.run.check import check_new_run, problems_of
from flows.run.workspace import Workspace
from flows.stages.problems import FIXED_SETS, TRAIN
from storage import layout
from storage.version_names import PolicyVersion, ProblemsVersion
from storage.versions import checkpoints, manifests
from storage.versions.checkpoints import Canary, Checkpoint
from tasks.agents.chat import differing_token
from tasks.agents.problem_checks import without_room
from tasks.inference.location import folder_of
from tasks.warm_start.policy_sizes import policy_place


@task(name="first-policy", cache_policy=NO_CACHE)
def first_policy(workspace: Workspace, sets: Sequence[ProblemsVersion] = (), *, plays: bool = True) -> PolicyVersion:
    """Commit policy version 0, from which training starts, unless it exists; return its version.

    Args:
        workspace: of the run.
        sets: for training and held out, as `import_problems` returns them: the run keeps them from now on.
        plays: whether the run plays the problems for training, which are tried then.

    Raises:
        ConfigError: agent, environment, tools and template do not play together.
        ValueError: the path, URI or hub name holds no usable policy, or the policy does not fit the agent, the context
            length or `policy.lora`.
    """
    version = layout.checkpoint(workspace.name, 0)
    if manifests.committed(workspace.store, version):
        return version
    begun = manifests.find(workspace.store, layout.run(workspace.name))
    if begun and begun.metrics.get("imported"):
        raise ValueError(f"the run {workspace.name} holds another program's trajectories: train with another run.name")
    from transformers.utils.logging import disable_progress_bar

    stored = all(isinstance(part.source, StoredSource) for part in workspace.config.problems.trained)
    if plays and (sets or stored):  # a night has those in its configuration
        problems = workspace.read_problems(sets[0]) if sets else problems_of(workspace)
        get_run_logger().info("a scripted policy plays an episode, before anything expensive")
        check_new_run(workspace, problems, get_run_logger().warning)
    from storage.versions.weights import empty_model, make_adapter
    from tasks.train.policy import load_policy, make_canary
    from tasks.warm_start.importing import import_policy, try_out

    disable_progress_bar()  # one of its own for each file that is written
    config = workspace.config
    with TemporaryDirectory(prefix="policy-", dir=workspace.scratch) as scratch:
        folder, metrics, canary, state = Path(scratch) / "model", dict[str, Any](), None, None
        if config.policy.fork:
            origin: str | None = (begins_with := _committed(workspace, "policy.fork", config.policy.fork))
            folder, canary, state = _forked(workspace, begins_with, Path(scratch))
        else:
            path = policy_place(config)
            get_run_logger().info("importing the policy from %s", path)
            origin = import_policy(path, folder, workspace.cache, workspace.store)
        _check_teacher(workspace, folder)
        # Errors of the first rollout show before anything is committed.
        chat = try_out(folder, config)
        for problem_set in sets if plays else sets[1:]:
            without_room(workspace.read_problems(problem_set), chat, config)
        if sets:
            metrics[FIXED_SETS] = dict(zip((TRAIN, evaluate.HELD_OUT), sets, strict=True))
        adapter = Path(scratch) / "adapter" if config.policy.lora else None
        if config.policy.lora and adapter:
            make_adapter(empty_model(folder), config.policy.lora, config.run.seed, adapter)
        device = "cpu" if config.train.parallel.ranks > 1 else config.train.device  # it may not fit one GPU
        canary = canary or make_canary(load_policy(folder, config.train.model_copy(update={"device": device})))
        parents = list(filter(None, [layout.run(workspace.name), origin]))
        provenance = workspace.provenance()
        checkpoints.commit(
            workspace.store, version, folder, state, canary, provenance, parents, metrics, adapter=adapter
        )
    return version


def _forked(workspace: Workspace, begins_with: PolicyVersion, scratch: Path) -> tuple[Path, Canary | None, Path | None]:
    """Open the checkpoint with which a fork begins; return its model, canary and train state (see `_continued`)."""
    config, log = workspace.config, get_run_logger()
    log.info("beginning with %s", begins_with)
    forked = checkpoints.open_checkpoint(workspace.store, begins_with, workspace.cache, state=True)
    folder, canary, state = _continued(forked, config, scratch)
    if state and (forked.adapter or config.policy.lora):
        log.info("the optimizer is new, and warms up anew (optimizer.warmup_steps=%g)", config.optimizer.warmup_steps)
    return folder, canary, state


def _committed(workspace: Workspace, knob: str, named: str) -> PolicyVersion:
    """Return the checkpoint `RUN@N` that a knob names; raise ValueError if there is none."""
    version = layout.checkpoint_of(named)
    if not manifests.committed(workspace.store, version):
        raise ValueError(
            f"{knob}={named}: there is no {workspace.store.uri(version)}. These are there: "
            f"`python -m storage ls --kind checkpoint --run {version.run}`"
        )
    return checkpoints.resolve_policy(workspace.store, version)


def _check_teacher(workspace: Workspace, policy: Path) -> None:
    """Check that the teacher exists, and that token ids mean the same to it as to the policy in a folder.

    Raises:
        ValueError: there is no such checkpoint, or it has another tokenizer; the message names the first token.
        StorageError: it cannot be read, or gc has deleted its data.
    """
    if not (knobs := workspace.config.models.teacher):
        return
    if knobs.checkpoint:
        version = _committed(workspace, "models.teacher.checkpoint", knobs.checkpoint)
        teacher = checkpoints.open_checkpoint(workspace.store, version, workspace.cache).model
    else:
        teacher = folder_of(workspace.config, "teacher")
    if difference := differing_token(policy, teacher, templates=False):
        named = f"checkpoint={knobs.checkpoint}" if knobs.checkpoint else f"path={knobs.path}"
        raise ValueError(f"models.teacher.{named} cannot teach this policy: {difference}")


def _continued(forked: Checkpoint, config: Config, scratch: Path) -> tuple[Path, Canary | None, Path | None]:
    """Return model, canary and train state with which a fork begins; an adapter is merged, so its canary is none's.

    Raises:
        ValueError: the checkpoint has no train state; the message names the nearest one that has.
    """
    from storage.versions.weights import save_merged
    from tasks.train.train_state import adapt

    state = scratch / "state" if forked.state else None
    if forked.state and state:
        shutil.copytree(forked.state, state)
        before = algorithms.read_algorithm(forked.manifest.settings["algorithm"])
        adapt(state, before, config.algorithm, other_weights=bool(forked.adapter or config.policy.lora))
    elif forked.number:  # number 0 of a run that is no fork has none
        every = int(forked.manifest.number("train.state_every"))
        nearest = f"{forked.version.run}@{forked.number // every * every}"
        raise ValueError(
            f"policy.fork={config.policy.fork} has no train state (train.state_every={every}): use {nearest}"
        )
    if not forked.adapter:
        return forked.model, forked.canary, state
    save_merged(forked, scratch / "model")
    return scratch / "model", None, state
