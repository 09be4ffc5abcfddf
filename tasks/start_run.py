"""Task: begin a run, or continue it with the same configuration."""

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from configs import Config, ConfigError, differences
from storage import layout
from storage.manifests import Draft
from tasks.workspace import Workspace

MAY_CHANGE = ("run.iterations", "storage.", "inference.", "score.workers", "rollout.concurrency", "rollout.request_")
"""Where and how long a run works may change while it lasts; what it computes may not."""


@task(name="start-run", cache_policy=NO_CACHE)
def start_run(config: Config) -> Workspace:
    """Commit the run's configuration; where the run exists already, refuse another one.

    Raises:
        ConfigError: the run was begun with another configuration; says what differs.
    """
    workspace = Workspace(config)
    version = layout.run(workspace.name)
    with Draft(workspace.store, version, "run") as draft:
        begun = draft.commit(workspace.provenance(), parents=[])
    changed = [
        line for line in differences(begun.config, config.model_dump(mode="json")) if not line.startswith(MAY_CHANGE)
    ]
    if changed:
        listing = "\n".join(f"  {line}" for line in changed)
        raise ConfigError(
            f"run {workspace.name!r} was begun with another configuration:\n{listing}\n"
            "Give it back, or begin another run with run.name=…"
        )
    state = "begins" if begun.nonce == draft.nonce else "continues"
    get_run_logger().info("run %s %s in %s", workspace.name, state, workspace.store.uri(f"runs/{workspace.name}"))
    return workspace
