"""A pipeline that is killed anywhere continues. No version is lost, doubled or made again, and no process is left.

tests/storage/test_every_failure.py fails at every call of every command that writes to a store. Here are real kills of
the whole pipeline: of each stage one, of a commit a few.
"""

import os
import random
import re
import signal
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from storage import layout
from storage.logs import leases
from storage.logs.log import Log
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import aliases, datasets, manifests
from tasks.train.replay import replay
from tasks.train.version_trainer import VersionTrainer
from tests.support.killed_flow import ANSWERS, MARK, OVERLAP, Point, no_process_left, start
from tests.support.soak import scaled

pytestmark = pytest.mark.slow

ITERATIONS, OVERLAPPING = scaled(15, 450), scaled(12, 20)
"""Iterations of the runs, so many that most of them hold one kill or more, and that some answer is right."""
PROBLEMS, SAMPLES = 4, 4
SETTINGS = [f"rollout.rows_per_shard={SAMPLES}", "evaluation.every=10", "algorithm.entropy_coefficient=0.1"]
"""The policy is too small to answer: the bonus for entropy changes its weights."""


EPISODE = "tasks.rollout.conversation:Conversation.play"
SHARD = "storage.versions.drafts:JournaledDraft.add_shard"
SCORE = "tasks.score.scoring:Grades.add"
STEP = "tasks.train.trainer:take_step"
SAVE = "tasks.train.version_trainer:save_weights"
WRITE = "tasks.train.version_trainer:VersionTrainer.write"
COMMIT = "storage.versions.drafts:Draft.commit"
ALIAS = "storage.versions.aliases:move"

POINTS = [
    Point("rollout", EPISODE, 7), Point("rollout", SHARD, 2, "after"), Point("score", SCORE, 5),
    Point("train", STEP, 2), Point("train", SAVE, 1, "after"), Point("store", WRITE, 2),
    Point("store", WRITE, 2, "after"), Point("commit", COMMIT, 3),
    Point("commit", COMMIT, 2, "after"), Point("commit", ALIAS, 1, "after"),
]  # fmt: skip
OVERLAP_POINTS = [
    Point("rollout", SHARD, 1, "after"),
    Point("rollout", SHARD, 4),
    *(Point("train", ANSWERS, nth, "after") for nth in (2, 3)),  # the trainer works
]
RANDOM_KILLS = scaled(2, 200)
LATEST_S = 3.0
"""The latest random moment at which a flow is killed, in seconds after its start."""


class Witness:
    """Starts flows, kills them, and checks the store afterwards."""

    def __init__(
        self, root: str, iterations: int, overrides: list[str], log: Path, environment: dict[str, str]
    ) -> None:
        self.store, self.iterations, self.log = Store(root), iterations, log
        self.overrides = [*overrides, *SETTINGS, f"storage.root={root}", f"run.iterations={iterations}"]
        self.environment = environment | {MARK: str(log)}
        self.committed: dict[str, str] = {}  # version: nonce
        self.journaled: set[str] = set()  # shards that were finished
        self.kills: Counter[str] = Counter()

    def run(self, point: Point | None, after_s: float | None = None) -> int:
        """Make one attempt; return its exit code."""
        process = start(self.overrides, point, self.log, self.environment)
        process.join(after_s)
        if process.is_alive():
            process.kill()
        process.join(120)
        code = process.exitcode
        assert code in (0, -signal.SIGKILL), self.log.read_text()[-5000:]
        if code:
            self.kills[str(point or "at a random moment")] += 1
        no_process_left(self.environment[MARK])
        self._nothing_lost()
        return code

    def _nothing_lost(self) -> None:
        """Check that every earlier commit is unchanged, and note the finished shards."""
        found = {}
        for item in self.store.walk("runs"):
            if item.path.endswith("/manifest.json"):
                version = item.path.removesuffix("/manifest.json")
                found[version] = manifests.read(self.store, version).nonce
            elif (place := layout.entry_of(item.path)) and place[0].endswith("/journal"):
                entry = Log(self.store, place[0]).read(place[1])
                self.journaled |= {shard["file"]["path"] for shard in entry.get("shards", ())}
        assert self.committed.items() <= found.items()
        self.committed = found


def assert_whole(witness: Witness, cache: Path) -> None:
    """Check that the chain is as an undisturbed run leaves it: each version and each row once, and all verified."""
    store, last = witness.store, layout.checkpoint("smoke", witness.iterations)
    assert verify(store, [last], deep=True).findings == []
    used = set()
    for iteration in range(witness.iterations):
        version = layout.trajectories("smoke", iteration)
        used |= {file.path for file in manifests.read(store, version).files}
        rows = list(datasets.trajectories(store, version, cache))
        assert len(rows) == len({row.trajectory_id for row in rows}) == PROBLEMS * SAMPLES
        assert {row.status for row in rows} <= {"completed", "truncated"}
    assert {path for path in witness.journaled if "/trajectories/" in path} <= used
    latest = aliases.current(store, "smoke/latest")
    assert latest
    assert latest.version == last
    assert leases.is_held(store, "smoke") is None
    assert [path for path in (cache / "scratch").rglob("*") if path.is_file()] == []  # not even of killed flows
    policies = [layout.checkpoint("smoke", number) for number in range(witness.iterations + 1)]
    tokens = [manifests.read(store, policy).fence for policy in policies]
    assert tokens == sorted(token for token in tokens if token is not None)


def weights(store: Store, *numbers: int) -> set[str]:
    """Return the digests of the policies' weights."""
    manifests_of = [manifests.read(store, layout.checkpoint("smoke", number)) for number in numbers]
    return {file.sha256 for each in manifests_of for file in each.files if file.name == "model/model.safetensors"}


def assert_undisturbed(witness: Witness, cache: Path) -> None:
    """Check that weights and state equal those of one trainer that trains on the stored rollouts without a stop."""
    # Only the first is read from the store: each of the others goes on from the one that was made before it.
    with patch.object(VersionTrainer, "_is_whole", lambda _, policy: policy.number == 0):
        made = replay(witness.store, f"smoke@0..{witness.iterations}", str(cache), print)
    assert {each.verdict for each in made[:-1]} <= {"the same bits", "made again; gc has deleted what to compare with"}
    assert made[-1].verdict == "the same bits"
    assert len(weights(witness.store, 0, witness.iterations)) == 2


def kill_and_finish(witness: Witness, attempts: list[tuple[Point | None, float | None]]) -> None:
    """Make the attempts in a random order, then one without a kill."""
    random.Random(1).shuffle(attempts)
    for point, after_s in attempts:
        if witness.run(point, after_s) == 0:
            break
    else:
        assert witness.run(None) == 0
    print(dict(witness.kills))


@pytest.mark.long
@pytest.mark.timeout(scaled(3600, 36_000))
def test_killed_anywhere(overrides: list[str], tmp_path: Path, environment: dict[str, str]) -> None:
    """After kills at chosen points and at random moments the run ends with the same result."""
    witness = Witness(f"{tmp_path}/var", ITERATIONS, overrides, tmp_path / "log", environment)
    dice = random.Random(2)
    moments = [dice.uniform(0.5, LATEST_S) for _ in range(RANDOM_KILLS)]
    kill_and_finish(witness, [*((point, None) for point in POINTS), *((None, moment) for moment in moments)])
    assert witness.kills.total() >= 0.8 * (len(POINTS) + len(moments))
    assert_whole(witness, tmp_path / "cache")
    assert_undisturbed(witness, tmp_path / "cache")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_killed_while_stages_overlap_on_s3(
    overrides: list[str], tmp_path: Path, environment: dict[str, str], bucket: str
) -> None:
    """The same holds while a stream plays during training, and where requests are in flight when the writer dies.

    Each drawn group is in exactly one data set.
    """
    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    environment |= {name: os.environ[name] for name in names if name in os.environ}
    witness = Witness(f"s3://{bucket}/var", OVERLAPPING, [*overrides, *OVERLAP], tmp_path / "log", environment)
    kill_and_finish(witness, [(point, None) for point in OVERLAP_POINTS])
    assert witness.kills.total() >= 3
    assert_whole(witness, tmp_path / "cache")
    versions = [layout.trajectories("smoke", iteration) for iteration in range(OVERLAPPING)]
    groups = [manifests.read(witness.store, version).metrics["stream"]["groups"] for version in versions]
    assert sorted(number for numbers in groups for number in numbers) == list(range(PROBLEMS * OVERLAPPING))
    assert_undisturbed(witness, tmp_path / "cache")


@pytest.mark.long
def test_two_ranks_play_two_iterations_although_their_flow_is_killed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The flow ends while the server has its second weights; no process stays, and the same command goes on.

    The bonus for entropy changes the weights in each iteration, whatever is sampled.
    """
    overrides = [
        *(f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", "score.workers=1"),
        *("inference.tensor_parallel=2", "algorithm.entropy_coefficient=0.01"),
        "inference.extra_args=[--kv-cache-memory-bytes, '67108864']",
    ]
    for point, status in ((Point("train", SAVE, 2), -9), (None, 0)):
        process = start(overrides, point, tmp_path / "flow.log", environment | {MARK: str(tmp_path)})
        process.join()
        assert process.exitcode == status, (tmp_path / "flow.log").read_text()[-5000:]
        no_process_left(str(tmp_path))
    store = Store(f"{tmp_path}/var")
    assert len(weights(store, 0, 1, 2)) == 3
    assert verify(store, [layout.checkpoint("smoke", 2)], deep=True).findings == []
    log = next((tmp_path / "cache").rglob("vllm-0.log")).read_text()
    assert set(re.findall(r"Worker_(TP\d)", log)) == {"TP0", "TP1"}
    meetings = re.findall(r"/(vllm_dist_[0-9a-f]+)", log)
    left = [path for meeting in meetings for path in Path("/dev/shm").glob(f"{meeting}-*")]
    for path in left:  # of the server that was killed
        path.unlink(missing_ok=True)  # the log may name a meeting twice
    assert not [path for path in left if path.name.startswith(meetings[-1])]
