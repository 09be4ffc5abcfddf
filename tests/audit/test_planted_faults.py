"""Every check finds its planted fault, names the rows, and is silent on runs with other faults or none."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from configs.audit import Audit, Checks
from storage import layout
from storage.objects.store import Store
from storage.versions.checkpoints import Checkpoint
from tasks.agents.chat import Chat, load_tokenizer
from tasks.agents.math_multi_turn import CORRECT_FEEDBACK
from tasks.audit.results import CheckResult
from tasks.audit.run import audit
from tasks.score.verifier import Verifier
from tasks.tables.sets import Case, select
from tests.support.audit_scene import Cast, Scene, commit_policy, compute_logprobs, set_scene, settings, spec_of, sums
from tests.support.branching import Branching, with_branches
from tests.support.planted_faults import FAULTS, GROUPS, Fault, answered, boxed, calculation, callers, gold, replayed

pytestmark = pytest.mark.slow

NAMES = [fault.name for fault in FAULTS]
EVERYTHING = Audit(examples=1_000_000, recomputed=1000)  # all rows of up to three data sets
CLEAN, CLEAN_GROUPS = "clean", 24
HELD_OUT = 50  # problems of the evaluation


@dataclass(frozen=True)
class Planted:
    """A fault that is planted in the store."""

    fault: Fault
    ids: set[str]  # ids that must be among the cases
    problems: set[str]  # ids of the run's problems
    sizes: dict[str, int]  # unit of cases: its number in a data set


def plant_all(store: Store, policies: Sequence[Checkpoint]) -> list[Planted]:
    """Commit a clean run and one run with each fault, played by two policies with the same tokenizer."""
    problems, chat = sums(CLEAN_GROUPS + GROUPS * len(FAULTS)), Chat(load_tokenizer(policies[0].model))
    versions = [commit_policy(store, settings(CLEAN), each.number, each.model, each.canary) for each in policies]
    cast = Cast(store, chat, problems, list(policies), versions, sums(HELD_OUT, "held-out"))
    scenes = [set_scene(cast, settings(CLEAN), range(CLEAN_GROUPS), (0, 1))]
    for number, fault in enumerate(FAULTS):
        begin = CLEAN_GROUPS + GROUPS * number
        config = settings(fault.name, *fault.overrides)
        scenes.append(set_scene(cast, config, range(begin, begin + GROUPS), fault.policies))
    compute_logprobs(scenes)
    clean, *others = scenes
    _enrich(clean)
    expected = [set(fault.plant(scene)) if fault.plant else set() for fault, scene in zip(FAULTS, others, strict=True)]
    compute_logprobs(scenes)
    clean.commit()
    return [_commit(*each) for each in zip(others, FAULTS, expected, strict=True)]


def _enrich(scene: Scene) -> None:
    """Make some answers long, repeat some right ones, let some episodes call a tool and branch; add an evaluation."""
    for row in [row for row in scene.rows if answered(row) and row.sample == 5]:
        scene.replay(row, boxed(gold(row)), boxed(gold(row)), feedback=CORRECT_FEEDBACK)
    for row in [row for row in scene.rows if row.turns and row.sample == 6]:
        scene.replay(row, f"First I add the tens, then the ones: {row.turns[0].text}")
    replayed(callers, "{right}", calls=calculation)(scene)
    for row in [row for row in scene.rows if row.turns and row.sample == 8]:
        episode = Branching(scene.cast.chat, spec_of(row), row.policy_version)
        scene.record(row, with_branches(episode, gold(row)))
    scene.evaluated = scene.cast.held_out


def _commit(scene: Scene, fault: Fault, expected: set[str]) -> Planted:
    scene.commit()
    if fault.damage:
        expected |= set(fault.damage(scene))
    calls, turns = (sum(len(getattr(row, unit)) for row in scene.rows) for unit in ("calls", "turns"))
    sizes = {"trajectory": len(scene.rows), "call": max(1, calls), "turn": turns, "group": GROUPS, "problem": GROUPS}
    return Planted(fault, expected, {problem.problem_id for problem in scene.problems}, sizes)


def look(store: Store, runs: Sequence[str], verifier: Verifier) -> dict[str, CheckResult]:
    """Audit these runs with all checks; return the results by check."""
    with audit(store, select(store, runs), EVERYTHING, Path(store.path("cache")), verifier) as audited:
        return {check.name: check for check in audited.result.checks}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(str(tmp_path_factory.mktemp("faults")))


@pytest.fixture(scope="module")
def planted(store: Store, policies: list[Checkpoint]) -> dict[str, Planted]:
    """All faults and a run without one, written to the store."""
    return {one.fault.name: one for one in plant_all(store, policies[:2])}


@pytest.fixture(scope="module")
def found(store: Store, planted: dict[str, Planted], verifier: Verifier) -> dict[str, dict[str, CheckResult]]:
    """The results of all checks by fault, of runs that are audited together where their faults allow it."""
    alone = [[name] for name, one in planted.items() if one.fault.alone]
    results = dict[str, dict[str, CheckResult]]()
    for runs in [[name for name, one in planted.items() if not one.fault.alone], *alone]:
        results |= dict.fromkeys(runs, look(store, runs, verifier))
    return results


@pytest.fixture(scope="module")
def clean(store: Store, planted: dict[str, Planted], verifier: Verifier) -> dict[str, CheckResult]:
    """The results of all checks for the run without a fault."""
    return look(store, [CLEAN], verifier)


def test_every_check_has_a_fault() -> None:
    """A check without a planted fault might find nothing at all."""
    assert {fault.check for fault in FAULTS} == set(Checks.model_fields)


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_found(
    planted: dict[str, Planted], found: dict[str, dict[str, CheckResult]], name: str
) -> None:
    """The check raises an alarm, and its cases include every planted row; no other check is alarmed without cause."""
    one, checks, false_alarms = planted[name], found[name], dict[str, int]()
    fault = one.fault

    def is_of_run(case: Case) -> bool:
        """Cases of several data sets are matched by the run's problems."""
        return layout.run_of(case.data_set) == name if case.data_set else case.id in one.problems

    cases = {check.name: [case.id for case in check.examples if is_of_run(case)] for check in checks.values()}
    for check in checks.values():  # a check of shares has cases in every data set, so the share counts
        is_share = 0 < check.threshold < 1 and check.unit in one.sizes
        value = len(cases[check.name]) / (one.sizes[check.unit] if is_share else 1)
        if check.name not in {fault.check, *fault.also} and value > check.threshold:
            false_alarms[check.name] = len(cases[check.name])
    assert one.ids, "nothing was planted"
    assert checks[fault.check].verdict in ("warn", "fail"), fault.check
    assert one.ids - set(cases[fault.check]) == set()
    assert false_alarms == {}


@pytest.mark.parametrize("name", Checks.model_fields)
def test_a_clean_run_passes(clean: dict[str, CheckResult], name: str) -> None:
    """Every check passes, and not because it had nothing to check."""
    check = clean[name]
    assert check.verdict == "pass", check.says
    assert check.of > 0
