"""What may change while a run lasts, and where a refusal points: to a fork."""

import pytest

from configs import ConfigError, load
from configs.train import FROM_NEXT_UPDATE
from storage import layout
from tests.support.begun import commit, start
from tests.support.chain_helpers import rewrite

CHANGED = [
    "optimizer.lr=1e-6", "optimizer.max_grad_norm=0.5", "algorithm.critic.lr=1e-7", "algorithm.c_clip=2.0",
    "algorithm.early_stop_imp_ratio=null", "algorithm.behaviour_weight.cap=2.0",
    "algorithm.advantage.bound=1.0",
]  # fmt: skip


@pytest.fixture
def begun(plain: list[str]) -> list[str]:
    """Return the overrides of a run that has made one update."""
    overrides = [*plain, "algorithm.advantage={type: gae}", "algorithm.critic={lr: 1e-5}"]
    for number in range(2):
        commit(start(*overrides), layout.checkpoint("smoke", number), "checkpoint")
    return overrides


def test_learning_rates_and_bounds_may_change(begun: list[str]) -> None:
    """A run that an update has stopped goes on under its name. The next checkpoints say what they were made with."""
    assert {override.partition("=")[0] for override in CHANGED} == set(FROM_NEXT_UPDATE)
    assert commit(start(*begun, *CHANGED), layout.checkpoint("smoke", 2), "checkpoint").knob("optimizer.lr") == 1e-6
    start(*begun)


def test_a_run_of_an_older_program_goes_on_in_a_fork(begun: list[str]) -> None:
    """One sentence names what this program lacks, and the fork; its answers may be scored all the same."""
    store = start(*begun).store
    rewrite(store, layout.run("smoke"), lambda values: values["config"].pop("release"))
    rewrite(store, layout.run("smoke"), lambda values: values["config"]["score"].update(reading="library"))
    with pytest.raises(ConfigError, match="begun by an older program, with settings that this one lacks:") as refused:
        start(*begun)
    assert "score.reading: 'library' -> 'answer'\n  score.success: 'reward' -> 'said'\n" in str(refused.value)
    assert "goes on from the newest checkpoint with its optimizer:\n  the same command with --fork smoke@1" in str(
        refused.value
    )
    start(*begun, "policy.fork=smoke@1", "run.name=smoke-fork")
    assert start(*begun, scoring=True).by_other_scorer


@pytest.mark.parametrize(
    "override", ["algorithm.eps_clip=0.3", "algorithm.behaviour_weight.level=sequence", "run.seed=2"]
)
def test_a_refusal_names_the_fork(begun: list[str], override: str) -> None:
    """What it says to do is a valid configuration, of a run that starts."""
    with pytest.raises(ConfigError, match="begun with another configuration") as refused:
        start(*begun, override)
    assert "--fork smoke@1 run.name=smoke-fork" in str(refused.value)
    fork = ["policy.fork=smoke@1", "run.name=smoke-fork"]
    assert all(each in str(refused.value) for each in fork)
    start(*begun, override, *fork)


def test_a_run_without_an_update_has_no_fork(plain: list[str]) -> None:
    commit(start(*plain), layout.checkpoint("smoke", 0), "checkpoint")
    with pytest.raises(ConfigError, match=r"or begin another run with run\.name=…$"):
        start(*plain, "algorithm.eps_clip=0.3")


@pytest.mark.parametrize("override", ["policy={fork: demo@1, path: x}", "policy={fork: ../x@1}"])
def test_forks_that_cannot_be(override: str) -> None:
    with pytest.raises(ConfigError, match=r"exactly one of policy.path and policy.fork|policy.fork='../x@1'"):
        load("smoke", [override])


def test_stored_answers_may_be_scored_by_another_scorer(begun: list[str]) -> None:
    """`flows.score` may name another; no other flow may, and `flows.score` nothing else."""
    other = ["score.type=environment", "score.args={environment: {success_above: 0.5}}"]
    assert not start(*begun, scoring=True).by_other_scorer
    assert start(*begun, *other, scoring=True).by_other_scorer
    assert start(*begun, "score.type=reward-model", "models.reward.path=x", scoring=True).by_other_scorer
    with pytest.raises(ConfigError, match="begun with another configuration"):
        start(*begun, *other)
    for override in ("agent.args.num_turns=3", "reward.shape=raw"):
        with pytest.raises(ConfigError, match="begun with another configuration") as refused:
            start(*begun, *other, override, scoring=True)
        assert "score.type" not in str(refused.value)


def test_a_limit_on_failures_may_change(begun: list[str]) -> None:
    """A judge that failed too often for the limit must not end a run for ever; its scores keep their name."""
    assert not start(*begun, "score.max_failure_share=0.5", scoring=True).by_other_scorer
    assert start(*begun, "score.max_failure_share=0.5").config.score.max_failure_share == 0.5
