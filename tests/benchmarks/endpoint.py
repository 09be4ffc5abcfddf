"""Episodes per second of an agent that speaks to the endpoint, against the same agent with queues."""

import time
from statistics import median
from typing import TYPE_CHECKING

from configs import Config
from configs.agent import Agent
from storage.versions.drafts import Draft
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import Row, spread

if TYPE_CHECKING:
    from tasks.rollout.workers import Workers

GOAL = 0.85
WARM_UP = 2
PAIRS = 12
QUEUES = Agent(type="math-multi-turn", args={"num_turns": 2})
ENDPOINT = Agent(type="openai", args={"entry": "tests.agents.endpoint.solvers:two_turns"})


def measure(lab: Lab) -> list[Row]:
    """Alternate between the two agents, each time with new problems and seeds, and 512 episodes at once."""
    from tasks.inference.engine import Engine
    from tasks.rollout.workers import LocalWorkers
    from tasks.score.verifier import Verifier

    config = lab.config()
    pairs = []
    with Engine(config.inference, config.rollout, lab.scratch) as engine, Verifier() as verifier:
        workers = LocalWorkers(engine, verifier, lambda _: lab.policy)
        workers.serve(lab.policy.version)
        for number in range(WARM_UP + PAIRS):
            # The second of a pair finds the verdicts of the first in the verifier's cache, so each is second in turn.
            order = (QUEUES, ENDPOINT) if number % 2 else (ENDPOINT, QUEUES)
            rates = {agent.type: _rate(lab, config, agent, number, workers) for agent in order}
            pairs.append((rates["openai"], rates["math-multi-turn"]))
    return [_row(pairs[WARM_UP:])]


def _row(pairs: list[tuple[float, float]]) -> Row:
    ratios = [endpoint / queues for endpoint, queues in pairs]
    endpoint, queues = (median(rates) for rates in zip(*pairs, strict=True))
    detail = f"512 two-turn episodes at once: {endpoint:.0f}/s, with queues {queues:.0f}/s; {len(pairs)} pairs"
    met = median(ratios) >= GOAL
    return Row(
        "agent at the endpoint / agent with queues", spread(ratios, "{:.2f}".format), f"{GOAL} or more", met, detail
    )


def _rate(lab: Lab, config: Config, agent: Agent, iteration: int, workers: "Workers") -> float:
    """Play one iteration; return its episodes per second."""
    from tasks.inference.api import GenerationConfig
    from tasks.problems import load_problems
    from tasks.rollout.plan import RolloutPlan, draw
    from tasks.rollout.play import play

    config = config.model_copy(update={"agent": agent})
    sampling, rollout = config.sampling, config.rollout
    name = f"endpoint-{agent.type}/{iteration:06d}"
    gconfig = GenerationConfig(1, sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens)
    plan = RolloutPlan(name, config, iteration, lab.policy.version, "", gconfig, rollout.group_size)
    problems = load_problems(config.problems.train, config.problems.max_bad_share).problems
    drawn = draw(problems, rollout.problems_per_iteration, iteration, config.run.seed)
    with Draft(lab.store, f"runs/{name}", "trajectories") as draft:
        start = time.perf_counter()
        metrics = play(plan, drawn, workers, draft, lambda _: None)
        seconds = time.perf_counter() - start
    assert metrics["episodes"] == rollout.problems_per_iteration * rollout.group_size
    return float(metrics["episodes"]) / seconds
