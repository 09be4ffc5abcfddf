"""Many nights against one target set: luck promotes nothing, real gains are found, and the log counts the looks."""

import pytest

from configs import ConfigError, load
from configs.evaluate import HELD_OUT, Gate
from configs.policy import LoRA, Policy
from storage.logs.nights import Ending, Record
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from tasks.retrain.gate import decide, level_of
from tasks.retrain.planning import continued, looks, night_config
from tests.experiments.nights import World, simulate
from tests.retrain.test_gate import evidence, right
from tests.storage.test_nights import END, NIGHT

EACH_NIGHT = Gate(max_by_luck=None)
"""The gate of older programs: the same level on each night."""


def test_the_levels_of_all_looks_sum_to_the_chance_of_luck() -> None:
    """Half of each level is the chance of a promotion by luck; however many nights, together they reach the knob."""
    levels = [level_of(look, Gate(max_by_luck=0.08)) for look in range(1, 100_000)]
    assert sum(levels) / 2 == pytest.approx(0.08, abs=1e-5)
    assert levels == sorted(levels, reverse=True)
    assert [round(level_of(look, Gate()), 4) for look in (1, 2, 3, 10)] == [0.025, 0.015, 0.01, 0.0019]
    assert level_of(1, Gate(max_by_luck=0.5)) == 0.05  # never less certain than 95 %
    assert {level_of(look, EACH_NIGHT) for look in (1, 60)} == {0.05}


@pytest.mark.parametrize("samples", [0, 8])
def test_luck_promotes_nothing_in_sixty_nights(samples: int) -> None:
    """Equal policies: at most 0.05 promotions in 60 nights, and a champion's score that is true to half a percent.

    With the same level on each night there were more than 0.2 promotions.
    """
    world = World(200, samples)
    now, before = (simulate(world, gate, series=400, nights=60) for gate in (Gate(), EACH_NIGHT))
    assert now.promoted.sum(axis=1).mean() <= 0.05 < 0.2 < before.promoted.sum(axis=1).mean()
    assert now.inflation.mean() <= 0.005 < before.inflation.mean()


@pytest.mark.parametrize(
    ("world", "before", "nights", "share"),
    [
        (World(200, 8, gain=0.05), 0, 1, 0.8),
        (World(200, 8, gain=0.05), 20, 10, 0.6),
        (World(1000, 0, gain=0.05), 0, 5, 0.9),
    ],
)
def test_a_real_gain_is_promoted_in_reasonable_time(world: World, before: int, nights: int, share: float) -> None:
    """A true gain of 0.05 is promoted in most series within days, also after 20 nights without a promotion."""
    assert simulate(world, Gate(), series=100, nights=nights, before=before).within(nights) >= share


def test_later_looks_ask_for_more() -> None:
    """A gain from 100 to 114 of 200 without a loss passes at once, and one of 8 only at an early look; both say so."""
    certain, doubtful = evidence(right(100), right(114)), evidence(right(100), right(108))
    assert [decide(found, Gate()).promote for found in (certain, doubtful)] == [True, True]
    fifth = evidence(right(100), right(108), look=5)
    late = decide(fifth, Gate())
    assert (late.promote, late.look, round(late.level, 4)) == (False, 5, 0.0054)
    assert late.checks[0].says.endswith("above +0.000, p = 0.0078, at most 0.0054 (look 5 since a promotion)")
    old = decide(fifth, EACH_NIGHT)
    assert old.promote
    assert old.checks[0].says.endswith("above +0.000, p = 0.0078")


def test_a_loss_that_is_allowed_has_the_confidence_of_the_look() -> None:
    """With a negative `least_gain` no gain is asked for: the interval alone decides, wider at each look."""
    equal = [evidence(right(100), right(100), look=look) for look in (1, 5)]
    assert [decide(same, Gate(least_gain=-0.025)).checks[0].passed for same in equal] == [True, False]


def ended(outcome: Ending, **changes: None) -> Record:
    return Record(NIGHT, end=END.model_copy(update={"outcome": outcome, **changes}))


def test_a_night_of_an_older_program_is_given_up() -> None:
    """One sentence says which of its settings nobody can choose any more, and what to do."""
    begun = load("smoke").model_dump(mode="json", exclude={"release"})
    night = NIGHT.model_copy(update={"config": begun})
    with pytest.raises(ConfigError, match=r"older program, .* \(.*reward\.failed: 'least' -> .*\): .* --give-up"):
        continued(night, load("smoke"))


def test_a_continued_night_may_be_helped() -> None:
    """It takes today's learning rate, bounds, exclusions and consent to other code, and keeps everything else."""
    night = NIGHT.model_copy(update={"config": load("smoke", ["algorithm.eps_clip=0.3"]).model_dump(mode="json")})
    helped = [
        "optimizer.lr=1e-7",
        "algorithm.c_clip=2.0",
        "problems.exclusions=[exclusions/1f0c]",
        "run.accept_code=true",
    ]
    assert continued(night, load("smoke", helped)) == load("smoke", [*helped, "algorithm.eps_clip=0.3"])


def test_looks_are_counted_from_the_log() -> None:
    """Every decision since the last promotion is a look, the next one included; a night that was given up is none."""
    assert looks([]) == looks([Record(NIGHT)]) == 1
    rejected, given_up = ended("rejected"), ended("given up", decision=None)
    assert looks([rejected, given_up, ended("overtaken"), Record(NIGHT)]) == 3
    assert looks([rejected, ended("promoted"), rejected, Record(NIGHT)]) == 2


def test_a_night_trains_an_adapter_of_the_champion() -> None:
    """It begins with the champion, and trains what the configuration says."""
    config, champion = load("retrain", ["policy.lora={rank: 3}"]), PolicyVersion("runs/n-0001/checkpoints/000008")
    night = night_config(config, Store("store"), 2, champion, "problems/0a", {HELD_OUT: "problems/0b"})
    policy = Policy.model_validate(night["policy"])
    assert policy.path
    assert policy.path.endswith(champion)
    assert (policy.warm_start, policy.lora) == (None, LoRA(rank=3))
