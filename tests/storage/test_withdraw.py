"""`python -m storage repair VERSION`: a version that lacks objects is made again instead of being broken for ever."""

import pytest

from storage import layout
from storage.__main__ import main
from storage.errors import LeaseHeldError, StorageError
from storage.logs.leases import Lease
from storage.maintenance import gc
from storage.maintenance.gc import withdraw
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.version_names import Version
from storage.versions import manifests
from storage.versions.drafts import Draft, Provenance
from tests.support.programs import call_program

POLICY = layout.checkpoint("r", 0)
EVALUATION = layout.evaluation(POLICY, "held-out", "greedy-1f")
OF_EVALUATION = layout.evaluation_scores(EVALUATION, "5c0e")
ROLLOUT, SCORES = layout.trajectories("r", 0), layout.scores("r", 0, "5c0e")
AUDIT = layout.audit("5c0e")
Made = dict[Version, list[str]]


def commit(store: Store, version: Version, *parents: str) -> None:
    with Draft(store, version, version.kind) as draft:
        (draft.scratch / "part").write_text(version)
        draft.add(draft.scratch / "part", "part")
        draft.commit(Provenance(config={}), parents)


def lose(store: Store, version: str) -> None:
    store.delete(manifests.read(store, version).files[0].path)


@pytest.mark.parametrize(
    ("lost", "again"),
    [
        (EVALUATION, {EVALUATION: [POLICY], OF_EVALUATION: [EVALUATION]}),
        (OF_EVALUATION, {OF_EVALUATION: [EVALUATION]}),
        (ROLLOUT, {ROLLOUT: [POLICY], SCORES: [ROLLOUT]}),
        (AUDIT, {AUDIT: [ROLLOUT]}),
    ],
)
def test_what_lacks_objects_is_made_again(store: Store, lost: Version, again: Made) -> None:
    """It and what was said about it do not exist any more, until the commands that made them commit them again."""
    made: Made = {POLICY: [], EVALUATION: [POLICY], OF_EVALUATION: [EVALUATION], ROLLOUT: [POLICY], SCORES: [ROLLOUT]}
    for each, parents in made.items():
        commit(store, each, *parents)
    if lost == AUDIT:
        commit(store, AUDIT, ROLLOUT)
    with pytest.raises(StorageError, match="lacks 0 objects"):
        withdraw(store, lost)
    lose(store, lost)
    assert "repair" in verify(store, [lost]).findings[0].problem
    assert set(withdraw(store, lost)) == set(again)
    for each, parents in again.items():
        assert not manifests.committed(store, each)
        commit(store, each, *parents)
    gc.collect(store, gc.Rules(older_than_s=-7200))
    assert [each for each in verify(store, [*made, *again]).findings if each.version != POLICY] == []


def test_what_others_name_by_its_hash_stays(store: Store) -> None:
    """Made again it would have another manifest, and their lineage would be broken; nothing changes in a live run."""
    newest = layout.checkpoint("r", 1)
    made: Made = {POLICY: [], ROLLOUT: [POLICY], SCORES: [ROLLOUT], newest: [POLICY, ROLLOUT, SCORES]}
    for version, parents in made.items():
        commit(store, version, *parents)
        lose(store, version)
    refused = {POLICY: ROLLOUT, ROLLOUT: "checkpoints/000001", newest: "nothing else"}
    for version, named in refused.items():
        with pytest.raises(StorageError, match=f"lacks 1 object, .*{named}.* was made from it.*Bring its objects back"):
            withdraw(store, version)
    with Lease(store, "r"), pytest.raises(LeaseHeldError):
        withdraw(store, SCORES)
    assert all(manifests.committed(store, version) for version in made)


def test_the_command_names_what_it_withdraws(store: Store) -> None:
    commit(store, EVALUATION)
    lose(store, EVALUATION)
    assert call_program(main, "repair", store.uri(EVALUATION))[0] == f"withdrawn {EVALUATION}\n"
    assert not manifests.committed(store, EVALUATION)
