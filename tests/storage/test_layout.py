"""Roots below folders that are called as a store's own folders, and runs that are."""

import pytest

from storage import layout
from storage.maintenance.export import _public
from tasks.inference.location import locate

ROOTS = (
    "s3://team/runs/prod", "s3://runs/runs", "/home/anna/problems/rl", "/mnt/audits/runs",
    "/mnt/runs/exclusions/runs/store", "runs/mine", "~/runs/demo/checkpoints", "/home/runs-of-mine",
)  # fmt: skip


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("run", ["demo", "runs", "problems", "checkpoints"])
def test_a_root_may_lie_below_folders_called_as_ours(root: str, run: str) -> None:
    """Root, run and version of a URI are those of its store, whatever the folders above and the run are called."""
    assert layout.split_uri(f"{root}/runs/{run}") == (root, f"runs/{run}")
    evaluation = layout.evaluation(layout.checkpoint(run, 3), "runs", "greedy-0a1b")
    checkpoint = layout.checkpoint(run, 3)
    for version in (checkpoint, evaluation, layout.evaluation_scores(evaluation, "0c"), layout.run(run)):
        assert layout.split_uri(f"{root}/{version}/") == (root, version)
        assert layout.find_run(f"{root}/{version}") == (root, run)
        assert layout.split_uri(version) == (None, version)
    for other in (layout.problems("0f"), layout.audit("0f"), layout.exclusions("0f")):
        assert layout.split_uri(f"{root}/{other}") == (root, other)
    assert locate(f"{root}/{checkpoint}", []) == (root, checkpoint)
    assert _public(f"{root}/{checkpoint}") in (checkpoint, f"{root}/{checkpoint}")
