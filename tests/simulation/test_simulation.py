"""An iteration that 50 simulated workers play, some of which are lost, in virtual time."""

import asyncio
import math

import pytest

from storage.versions import drafts, manifests
from tests.simulation.__main__ import main
from tests.simulation.clock import VirtualLoop, World
from tests.simulation.cluster import Scenario
from tests.simulation.scenario import VERSION, Outcome, simulate
from tests.support.soak import scaled

pytestmark = pytest.mark.long

SCENARIO = Scenario(
    workers=scaled(50, 1000),
    episodes=scaled(20_000, 1_000_000),
    slots=scaled(64, 256),
    median_s=20,
    hours_between_losses=0.25,
)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return simulate(SCENARIO)


def test_every_group_is_stored_once(outcome: Outcome) -> None:
    """Nothing is lost and nothing is stored twice, although workers were lost with groups that they played or held."""
    assert outcome.cluster.lost > 5
    assert outcome.cluster.wasted > 0
    entered = drafts.shards(outcome.store, VERSION)
    stored = [note["problem_id"] for shard in entered.values() for note in shard.notes]
    groups = SCENARIO.episodes // SCENARIO.group_size
    assert sorted(stored) == sorted(f"problem {number}" for number in range(groups))


def test_the_manifest_counts_each_episode_once(outcome: Outcome) -> None:
    """The committed manifest names the shards of the journal, with all rows and the metrics of all groups."""
    manifest = manifests.read(outcome.store, VERSION)
    assert {file.path for file in manifest.files} == drafts.shards(outcome.store, VERSION).keys()
    assert manifest.rows == manifest.metrics["episodes"] == SCENARIO.episodes
    assert manifest.metrics["status"] == {"completed": SCENARIO.episodes}
    assert manifest.metrics["generated_tokens"] == 700 * SCENARIO.episodes


def test_workers_are_busy(outcome: Outcome) -> None:
    """Until the last group is handed out, workers wait for the next group for hardly a hundredth of their time."""
    assert outcome.cluster.all_begun
    _, utilisation = outcome.cluster.all_begun
    assert utilisation > 0.99


def test_the_data_set_is_committed_soon_after_its_last_episode(outcome: Outcome) -> None:
    """Only what is still in memory is stored after the last episode."""
    assert outcome.played_s - outcome.cluster.last_finished_s + outcome.commit_s < 2


def test_requests_to_the_store_are_bounded(outcome: Outcome) -> None:
    """The flow sends two requests for a shard at most, and a worker two; few shards are small."""
    requests, manifest = outcome.requests, outcome.manifest
    shards, lost = len(manifest.files), outcome.cluster.lost
    assert requests["create"] + requests["read"] <= shards + 10
    assert requests["look"] <= requests["upload"] + shards + 10
    assert shards <= requests["upload"] <= shards + lost  # what a lost worker had uploaded, but not reported
    full = math.ceil(SCENARIO.episodes / SCENARIO.rows_per_shard)
    assert outcome.cluster.all_begun
    tail_s = outcome.played_s - outcome.cluster.all_begun[0]
    assert shards <= full + SCENARIO.workers * (1 + tail_s / 30)


def test_workers_are_called_for_a_reason(outcome: Outcome) -> None:
    """A group costs its orders, its report and the order to store it; besides, there is a beat now and then."""
    calls, groups = outcome.cluster.calls, len(outcome.cluster.begun)
    shards, workers = len(outcome.manifest.files), SCENARIO.workers + outcome.cluster.lost
    assert calls["give"] <= 2.2 * groups + shards + 10 * workers
    assert calls["report"] <= 2.2 * groups + 2 * shards + workers * (10 + outcome.played_s)


def test_the_same_seed_gives_the_same_iteration() -> None:
    """Without processor time on the clock, the simulation depends on its seed only."""
    few = Scenario(workers=5, episodes=1_600, slots=32, median_s=10, hours_between_losses=0.1)
    first, again = simulate(few), simulate(few)
    assert first.cluster.lost > 0
    assert (first.played_s, first.cluster.calls) == (again.played_s, again.cluster.calls)
    assert first.requests == again.requests


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints a table; time passes while the flow computes, so messages are pickled, too."""
    options = "--workers 4 --episodes 800 --slots 32 --median-s 5 --cpu --call-cpu-s 0.0006"
    monkeypatch.setattr("sys.argv", ["simulation", *options.split()])
    assert main() == 0
    assert "800 in" in capsys.readouterr().out


def test_the_clock_jumps_but_waits_while_the_flow_computes() -> None:
    """Time passes at once if nothing is to do, and not at all for what computes, unless processor time counts."""
    world = World()
    loop = VirtualLoop(world, lambda: 0.0, cpu=False)
    happened: list[float] = []

    async def wait() -> float:
        world.after(40.0, lambda: happened.append(world.now))
        await asyncio.sleep(100.0)
        return loop.time()

    loop.release()
    try:
        assert loop.run_until_complete(wait()) == pytest.approx(100.0)
        loop.spend(5.0)
        assert loop.time() == pytest.approx(100.0)
    finally:
        loop.close()
    assert happened == [40.0]
