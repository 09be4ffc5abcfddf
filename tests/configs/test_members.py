"""Members of a mixture in a configuration: what they give, what they take from the run, and what is refused."""

import pytest

from configs import Config, ConfigError, differences, load, read_stored, to_yaml, up_to_date
from storage import layout
from tasks.evaluate.protocol import greedy
from tasks.registry import own_code
from tests.configs.test_config import load_text

SUMS = "{name: sums, weight: 2, source: {kind: arithmetic, high: 9}, reject_equal: true}"
TOOLS = "{name: tools, source: {kind: arithmetic, low: 100, high: 120}, agent: {type: openai, tools: [calculator]}}"
GAME = "{name: game, source: {kind: guess-number}, environment: {type: guess-number}, score: environment}"
IMPORTED = "policy={path: my-model}"


def mixture(*overrides: str, members: str = f"{SUMS}, {TOOLS}, {GAME}") -> Config:
    return load("smoke", [f"problems.train=[{members}]", *overrides])


def test_a_member_gives_what_it_has_and_takes_the_rest_from_the_run() -> None:
    """Agent and environment are whole sections; of the filters each counts for itself."""
    config = mixture("rollout.success_rate_ub=0.9")
    sums, tools, game, other = (config.of_source(name) for name in ("sums", "tools", "game", "other"))
    assert other is config
    assert (sums.agent, sums.environment) == (config.agent, config.environment)
    assert (tools.agent.type, tools.agent.args, game.environment.type) == ("openai", {}, "guess-number")
    assert [each.rollout.reject_equal for each in (sums, tools)] == [True, False]
    assert {each.rollout.success_rate_ub for each in (sums, tools, game)} == {0.9}
    places = {name: number for number, name in enumerate(("sums", "tools", "game"))}
    assert [where for where, _ in config.played] == [f"problems.train[{n}] ({name}): " for name, n in places.items()]
    assert load("smoke").played == [("", load("smoke"))]


def test_the_scorer_of_a_member_is_that_of_its_source() -> None:
    """What reads `score.type`, also of older stores, needs to know nothing of mixtures."""
    assert mixture().score.by_source == {"default": "math-verify", "game": "environment"}
    assert mixture("score.type={default: code, game: environment}").score.by_source["default"] == "code"
    assert mixture(IMPORTED, members=SUMS).score == load("smoke").score
    with pytest.raises(ConfigError, match=r"score.type.game='code', but its member of problems.train names"):
        mixture("score.type={default: math-verify, game: code}")


def test_a_mixture_is_stored_and_read_back() -> None:
    """Also by programs with more knobs: members get their defaults, as all sections do."""
    config = mixture("problems.train.1.weight=0.5")
    assert config.problems.members[1].weight == 0.5
    assert load_text(to_yaml(config)) == config
    stored = config.model_dump(mode="json")
    assert differences(up_to_date(stored), stored) == []
    for member in stored["problems"]["train"]:
        for knob in ("reject_equal", "weight", "held_out"):
            del member[knob]
    del stored["problems"]["train"][1]["agent"]["args"]
    filled = read_stored(stored, "a run").problems.members
    assert [(each.weight, each.held_out, each.reject_equal) for each in filled] == [(1.0, None, None)] * 3
    assert "weight" in up_to_date(stored)["problems"]["train"][0]
    assert up_to_date(stored)["problems"]["train"][1]["agent"]["args"] == {}


def test_held_out_problems_are_those_of_members_then_the_runs() -> None:
    own = "{kind: guess-number, split: held-out, count: 3}"
    config = mixture(IMPORTED, members=f"{SUMS}, {GAME[:-1]}, held_out: {own}}}")
    assert [(part.name, part.source.kind) for part in config.problems.evaluated] == [
        ("game", "guess-number"),
        ("", "arithmetic"),
    ]
    assert config.problems.evaluated[0].where == "problems.train[1] (game): "
    alone = load("smoke", [f"problems={{train: [{SUMS[:-1]}, held_out: {own}}}]}}"])
    assert [part.name for part in alone.problems.evaluated] == ["sums"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ("", r"problems.train=\[\]: List should have at least 1 item"),
        (f"{SUMS}, {SUMS}", "problems: train names 'sums' twice: give each member"),
        (SUMS.replace("weight: 2", "weight: 0"), "problems.train.0.weight=0: Input should be greater than 0"),
        (SUMS.replace("weight: 2", "weight: .inf"), "problems.train.0.weight=inf: Input should be a finite number"),
        (SUMS.replace("weight: 2", "wieght: 2"), r"problems.train.0.wieght=2: unknown key, did you mean 'weight'\?"),
        (SUMS.replace("name: sums, ", ""), "problems.train.0.name: must be given"),
        (SUMS.replace("name: sums", "name: default"), "'default' stands for all other sources"),
        ("3", "problems.train.0=3: Input should be a valid dictionary"),
        (f"{GAME}, {SUMS.replace('high', 'hihg')}", "problems.train.1.source.arithmetic.hihg=9: unknown key"),
        (f"{GAME}, {TOOLS.replace('type', 'tpye')}", r"problems.train.1.agent.tpye='openai': unknown key"),
        (f"{SUMS}, {GAME[:-1]}, success_rate_lb: 0.9, success_rate_ub: 0.1}}, {TOOLS}", r"\[1\] \(game\): .*rejected"),
        (f"{SUMS}, {GAME.replace('guess-number', 'guess-number, high: 1', 1)}", "must be above low=1"),
    ],
)  # fmt: skip
def test_members_that_cannot_work_are_refused(members: str, message: str) -> None:
    """Messages name the member by its place or by its name."""
    with pytest.raises(ConfigError, match=message):
        mixture(members=members)


def test_contradictions_with_other_sections_name_the_member() -> None:
    for override, message in {
        "algorithm={type: dapo}": r"problems.train\[1\] \(tools\): algorithm.type=dapo replaces groups",
        "problems.held_out=null": "held_out must be given, here or in a member of the mixture",
        "problems.train.3.weight=1": "cannot be applied",
    }.items():
        with pytest.raises(ConfigError, match=message):
            mixture(override)
    every = [f"problems.train.{place}.reject_equal=true" for place in range(3)]
    assert mixture("algorithm={type: dapo}", *every).algorithm.type == "dapo"  # it asks for that, wherever it is


def test_the_protocol_of_an_evaluation_has_the_members() -> None:
    """Another agent of a member plays another evaluation; another weight does not. Without a mixture names stay."""

    def name(config: Config) -> str:
        return greedy(config, "held-out", layout.problems("0" * 16)).digest

    assert name(mixture()) == name(mixture("problems.train.0.weight=9", "problems.train.0.reject_equal=null"))
    assert len({name(mixture()), name(mixture("problems.train.1.agent.args={num_turns: 2}")), name(load("smoke"))}) == 3


def test_own_code_of_members_is_covered() -> None:
    """A changed agent of a member is noticed like one of the run."""
    mine = "tests.rollout.test_scripted"
    config = mixture(members=f"{SUMS}, {TOOLS}, {GAME.replace('type: guess-number', f'type: {mine}:Maze')}")
    assert "tests/rollout/test_scripted.py" in own_code(config, ["environment"])
    assert own_code(config, ["agent"]) == {}
    own = GAME.replace("score: environment", "score: tests.support.own_scorers:decides")
    assert "tests/support/own_scorers.py" in own_code(mixture(members=f"{SUMS}, {TOOLS}, {own}"))
