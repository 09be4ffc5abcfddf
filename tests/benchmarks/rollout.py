"""Episodes per second of the rollout stage, against the same bare requests to the same server."""

import asyncio
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from configs import Config
from configs.agent import Agent
from storage.versions.drafts import Draft
from tests.benchmarks.fixtures import Lab
from tests.benchmarks.result import ProcessorTime, Row, spread

if TYPE_CHECKING:
    from tasks.rollout.plan import RolloutPlan
    from tasks.rollout.play import Workers

WARM_UP = 2
PAIRS = 12

Request = tuple[str, dict[str, Any]]
"""Path and JSON body."""


@dataclass(frozen=True, slots=True)
class _Measured:
    seconds: float
    processor_s: float  # of all processes of this one
    completions: int
    tokens: int


def measure(lab: Lab) -> list[Row]:
    """Compare iterations of the stage with the same bare requests."""
    return [_row(*pairs_of(lab))]


def pairs_of(lab: Lab, count: int = PAIRS) -> tuple[list[tuple[_Measured, _Measured]], float]:
    """Alternate `count` times between an iteration of the stage and its bare requests, with new problems and seeds.

    Returns:
        the pairs after those of the warm-up, and the answers that were graded in an iteration.
    """
    from tasks.inference.engine import Engine
    from tasks.rollout.workers import LocalWorker
    from tasks.score.verifier import Verifier

    config = lab.config().model_copy(update={"agent": Agent(type="math-single-step")})
    pairs, processor = [], ProcessorTime()
    with Engine(config.inference, config.rollout, lab.scratch) as engine, Verifier() as verifier:
        workers = LocalWorker(engine, verifier, lambda _: lab.policy)
        workers.serve(lab.policy.version)
        for number in range(WARM_UP + count):
            processor.look()
            stage, requests = _stage(lab, _plan(lab, config, number), workers, processor)
            pairs.append((stage, asyncio.run(_bare(config.inference.urls[0], requests, processor))))
        graded = verifier.sent / len(pairs)
    return pairs[WARM_UP:], graded


def _row(pairs: list[tuple[_Measured, _Measured]], graded: float) -> Row:
    ratios = [bare.seconds / stage.seconds for stage, bare in pairs]
    rates = [median(run.completions / run.seconds for run in runs) for runs in zip(*pairs, strict=True)]
    assert all(stage.completions == bare.completions for stage, bare in pairs)
    same = sum(stage.tokens == bare.tokens for stage, bare in pairs)
    detail = (
        f"{pairs[0][0].completions} single-turn episodes, graded ({graded:.0f} distinct answers) and in Parquet: "
        f"{rates[0]:.0f}/s, bare {rates[1]:.0f}/s; {len(pairs)} pairs, {same} of them with the same number of tokens"
    )
    return Row("rollout stage / bare requests", spread(ratios, "{:.2f}".format), detail)


def _plan(lab: Lab, config: Config, iteration: int) -> "RolloutPlan":
    from tasks.inference.api import GenerationConfig
    from tasks.rollout.plan import RolloutPlan

    sampling = config.sampling
    gconfig = GenerationConfig(1, sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens)
    return RolloutPlan(
        f"rollout/{iteration:06d}", config, iteration, lab.policy.version, "", gconfig, config.rollout.group_size
    )


def _stage(
    lab: Lab, plan: "RolloutPlan", workers: "Workers", processor: ProcessorTime
) -> tuple[_Measured, list[Request]]:
    """Play the plan's iteration; return its measurement and the requests that it sent to the server."""
    from tasks.inference.client import Client
    from tasks.problems import load_problems
    from tasks.rollout.plan import draw
    from tasks.rollout.play import play

    config, requests, post = plan.config, [], Client._ask

    async def recorded(client: Client, path: str, body: dict[str, Any], **how: Any) -> dict[str, Any]:
        requests.append((path, body))
        return await post(client, path, body, **how)

    problems = load_problems(config.problems.trained[0].source, config.problems.max_bad_share).problems
    drawn = draw(problems, config.rollout.problems_per_iteration, plan.iteration, config.run.seed)
    with Draft(lab.store, f"runs/{plan.name}", "trajectories") as draft, patch.object(Client, "_ask", recorded):
        start, used = time.perf_counter(), processor()
        metrics = play(plan, drawn, workers, draft, lambda _: None)
        spent = time.perf_counter() - start, processor() - used
    return _Measured(*spent, metrics["episodes"], metrics["generated_tokens"]), requests


async def _bare(url: str, requests: list[Request], processor: ProcessorTime) -> _Measured:
    """Send all requests at once, and only parse the answers as JSON."""
    import aiohttp

    from tasks.inference.client import connect

    start, used = time.perf_counter(), processor()
    connector, base = connect(url)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(request: Request) -> Any:
            path, body = request
            async with session.post(f"{base}{path}", json=body) as response:
                response.raise_for_status()
                return await response.json()

        answers = await asyncio.gather(*map(ask, requests))
    spent = time.perf_counter() - start, processor() - used
    choices = [choice for answer in answers for choice in answer["choices"]]
    return _Measured(*spent, len(choices), sum(len(choice["token_ids"]) for choice in choices))
