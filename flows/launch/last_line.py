"""The last line of a flow that runs one stage: what the store has now, and the whole command that comes next."""

import shlex
from collections.abc import Iterable

from prefect import get_run_logger, runtime

from flows.run.workspace import Workspace
from storage.versions import manifests


def tell_last(workspace: Workspace, versions: Iterable[str], module: str, *words: object) -> None:
    """Say which versions this flow run has committed and which were there already, and name the next command.

    Args:
        workspace: of the flow.
        versions: what the stage has made or found.
        module: of the next command; a flow gets configuration and overrides of this one, others its store.
        words: further words of that command.
    """
    given, store, lines = runtime.flow_run.parameters, workspace.store, []
    for version in versions:
        is_new = manifests.read(store, version).prefect_run_id == runtime.flow_run.id
        lines.append(f"{version} {'is committed' if is_new else 'was there already'}")
    stage = f"iteration {given['iteration']}: " if "iteration" in given else ""
    before = [given["config"], *(given["overrides"] or ())] if module.startswith("flows.") else ["--root", store.root]
    command = shlex.join(["python", "-m", module, *before, *map(str, words)])
    get_run_logger().info("%s%s. Next: %s", stage, "; ".join(lines), command)
