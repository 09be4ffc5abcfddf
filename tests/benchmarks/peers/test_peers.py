import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from configs import load
from storage.records import Problem
from tasks.problems import load_problems
from tasks.rollout.plan import draw
from tests.benchmarks.peers.__main__ import FOLDER, REQUIREMENTS, TITLES, compared
from tests.benchmarks.peers.sides import WORKLOADS, Side, check_same_work, job
from tests.benchmarks.peers.trl_side import TEMPLATE, Job
from tests.support.overlay import is_made

SIDE = Side([2.0, 1.0, 3.0], [5, 6, 7, 6] * 100, samples=400, updates=6, parameters=10, dtypes=("float32",), threads=2)


def test_other_work_is_refused() -> None:
    """A ratio of different work would mean nothing. Lengths may differ as two samples of one policy do."""
    check_same_work(SIDE, replace(SIDE, lengths=[6, 5, 6, 7] * 100, seconds=[1.0, 1.0, 1.0]))
    for difference in ({"seconds": [2.0]}, {"samples": 399}, {"threads": 1}, {"lengths": [6, 7, 8, 7] * 100}):
        with pytest.raises(ValueError, match="TRL .* here "):
            check_same_work(SIDE, replace(SIDE, **difference))


@pytest.mark.parametrize("name", WORKLOADS)
def test_both_sides_have_the_settings_of_one_configuration(name: str) -> None:
    """TRL gets the problems that the pipeline draws, in its order, and the knobs that decide how much work there is."""
    config = load("demo", list(WORKLOADS[name].overrides))
    made = Job(**job(config, 3, Path("model")))  # type: ignore[arg-type]  # the values are JSON
    problems: list[Problem] = load_problems(config.problems.trained[0].source, 0.0).problems
    drawn = [problem.prompt for iteration in range(3) for problem in draw(problems, 32, iteration, config.run.seed)]
    assert [problem["prompt"] for problem in made.problems] == drawn
    assert (made.groups, made.samples, made.updates, made.threads) == (32, 16, 2, 2)
    assert made.turns == config.agent.args["num_turns"]
    assert (made.max_new_tokens, made.optimizer["learning_rate"]) == (config.sampling.max_new_tokens, 1e-4)
    assert {field.name for field in fields(Job)} == job(config, 1, Path("model")).keys()


def test_a_tools_reply_is_rendered_as_the_users_feedback() -> None:
    """The policy reads the same tokens in TRL's environment as in the pipeline."""
    from tests.support.tiny_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(["What is your answer? wrong"])

    def ids(template: str | None, role: str) -> object:
        messages = [
            {"role": "user", "content": "What is 1 + 2?"},
            {"role": "assistant", "content": "4"},
            {"role": role, "content": "Your answer is wrong."},
        ]
        return tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=False
        )

    assert ids(TEMPLATE, "tool") == ids(None, "user")


@pytest.mark.slow
@pytest.mark.long
def test_both_sides_do_the_same_work() -> None:
    """The benchmark runs to its line: one round of each side after one that is not counted."""
    if not is_made(FOLDER, REQUIREMENTS):
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no {FOLDER}: make setup-agents")
    made = compared("short", replace(WORKLOADS["short"], rounds=1, warm_up=1), FOLDER / "bin/python", 1)
    assert len(made) == len(TITLES)
    assert made[-2:] == ["512 / 512", "2 / 2"]
    assert all(float(cell.split()[0]) > 0 for cell in made[1:])
