"""Hand-made runs without model and engine, for tests of which policies were trained on which problems."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from storage import layout
from storage.objects.seal import seal
from storage.objects.store import Store
from storage.records import Fault, Problem, Status
from storage.version_names import PolicyVersion
from storage.versions import manifests
from tasks.problems import fingerprint
from tasks.provenance.__main__ import main
from tests.support.chain_helpers import commit_rows, commit_text
from tests.support.programs import call_program
from tests.support.train_helpers import make_scores, make_trajectory

ONE, TWO = Problem("1", "What is 1 + 1?", ["2"]), Problem("2", "What is 2 + 2?", ["4"])
OTHER = Problem("1", "What is 5 + 5?", ["10"])  # has the id of ONE, but in another set


@dataclass(frozen=True)
class Played:
    """One episode: its problem, its result and its policy version."""

    problem: Problem
    successes: Sequence[float] = (1.0,)
    status: Status = "completed"
    version: int | None = None  # policy version that sampled it; None: the newest
    fault: Fault = ""
    timeout: str | None = None  # the reason, if this is the verdict on all turns


@dataclass
class Place:
    """A store, and methods that commit versions of hand-made runs to it."""

    store: Store

    def problems(self, *problems: Problem) -> str:
        version = layout.problems(fingerprint(problems))
        if not manifests.committed(self.store, version):
            commit_rows(self.store, version, "problems", problems, [], config={})
        return version

    def begin(self, run: str, origin: str | None = None, config: dict[str, Any] | None = None) -> str:
        """Commit a run and its policy version 0; return the checkpoint's version."""
        parents = [commit_text(self.store, layout.run(run), config=config), *([origin] if origin else [])]
        return commit_text(self.store, layout.checkpoint(run, 0), *parents, config=config)

    def play(self, run: str, iteration: int, problem_set: str, *played: Played) -> tuple[str, str]:
        """Commit the trajectories of an iteration and their scores; return both versions."""
        data_set, scores = layout.trajectories(run, iteration), layout.scores(run, iteration, "5c0e")
        rows, scored = [], []
        for sample, each in enumerate(played):
            name = f"{run}/{iteration:06d}/{each.problem.problem_id}/{sample}"
            turns = [[7, 8]] * len(each.successes)
            version = iteration if each.version is None else each.version
            row = make_trajectory(name, turns, status=each.status, version=version)
            known = asdict(each.problem) | {"run": run, "iteration": iteration, "sample": sample, "fault": each.fault}
            rows.append(replace(row, **known))
            scores_of = make_scores(name, *each.successes)
            if each.timeout is not None:
                scores_of = [replace(score, verdict="timeout", reason=each.timeout) for score in scores_of]
            scored += scores_of
        policies = filter(partial(manifests.committed, self.store), [layout.checkpoint(run, iteration)])
        commit_rows(self.store, data_set, "trajectories", rows, [*policies, problem_set], config={})
        commit_rows(self.store, scores, "scores", scored, [data_set], config={})
        return data_set, scores

    def train(self, run: str, iteration: int, *exclusions: str) -> str:
        """Commit the checkpoint of an update on the versions that `play` committed; return its version."""
        config = {"rollout": {"max_head_offpolicyness": 0}}
        data = [layout.trajectories(run, iteration), layout.scores(run, iteration, "5c0e")]
        parents = [layout.checkpoint(run, iteration), *data, *exclusions]
        return commit_text(self.store, layout.checkpoint(run, iteration + 1), *parents, config=config)

    def iterate(self, run: str, iteration: int, problem_set: str, *played: Played) -> str:
        self.play(run, iteration, problem_set, *played)
        return self.train(run, iteration)

    def evaluate(self, policy: str, name: str, problem_set: str) -> str:
        version = layout.evaluation(PolicyVersion(policy), name, "greedy-0123456789ab")
        commit_rows(self.store, version, "evaluation", [], [policy, problem_set], config={})
        return version

    def collect(self, version: str) -> None:
        """Delete a version's data as gc does: write the tombstone first, then delete the data objects."""
        self.store.write(layout.tombstone(version), seal({"version": version}))
        for file in manifests.read(self.store, version).files:
            self.store.delete(file.path)


def two_runs(place: Place) -> Place:
    """Make runs: `a` plays ONE from its second of three iterations, `b` begins with a's checkpoint 1, `c` with 3."""
    both, other = place.problems(ONE, TWO), place.problems(OTHER)
    place.begin("a")
    place.iterate("a", 0, both, Played(TWO), Played(TWO, [0.0, 0.0]))
    place.iterate("a", 1, both, Played(ONE), Played(ONE, [0.0, 1.0]), Played(ONE, [0.0]), Played(TWO))
    place.iterate("a", 2, both, Played(ONE, status="rejected"), Played(TWO))
    place.begin("b", layout.checkpoint("a", 1))
    place.iterate("b", 0, other, Played(OTHER), Played(OTHER, [0.0]))
    place.begin("c", layout.checkpoint("a", 3))
    return place


def caller(store: Store) -> Callable[..., str]:
    """Return a function that runs `python -m tasks.provenance` on `store` in this process and returns what it prints.

    For a `status` other than 0 it returns the output on standard error.
    """

    def call(*arguments: str, status: int = 0) -> str:
        out, errors = call_program(main, "--root", store.root, *arguments, status=status)
        return errors if status else out

    return call
