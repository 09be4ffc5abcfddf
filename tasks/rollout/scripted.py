"""A scripted episode: do agent, environment, tools, template and scorer of a configuration play together?

It needs no policy, only its tokenizer, and is played and graded by the code of all episodes. The script calls the first
tool that the agent offers, as the chat template writes calls, and then gives the problem's first solution. Each other
tool is called in another episode, since agents limit calls. Policies say other things: what fails before the first
completion fails for all of them, what fails later may be the script's fault.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from configs import Config, ConfigError
from configs.score import BY_MODEL
from storage import layout
from storage.records import TRAJECTORY_SCHEMA, Call, Problem, Trajectory, to_table
from storage.visible import visible
from tasks.agents.chat import Chat
from tasks.inference.api import Completion, ContextLengthError, GenerationConfig
from tasks.rollout.collector import collect
from tasks.rollout.plan import Group, RolloutPlan
from tasks.rollout.play import run_loop
from tasks.rollout.workers import open_player
from tasks.score.scorers import Scorers
from tasks.score.scoring import scored
from tasks.score.verifier import Verifier

Rows = list[dict[str, Any]]
Tell = Callable[[str], None]
_MOST = 32
"""Most completions of the episode: some agents ask until the context is full."""
_LONGEST = 20_000  # characters of an episode, or of a tool's output, that are told
_VALUES: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
"""What the script gives for an argument, by its type in the tool's schema; "1" for others."""


class Script(Chat):
    """A chat that is its own policy: it calls one tool of those offered, by its `place`, once, and else says `text`.

    Attributes:
        tools: those offered.
        called: the tool that it has called, or would have: a template may write no calls (`unwritten`).
        reached: how far the episode has come, for messages.
    """

    replicas = 1

    def __init__(self, policy: Sequence[Any], text: str, max_model_len: int, place: int = 0) -> None:
        self.tools: Sequence[dict[str, Any]] = ()
        super().__init__(*policy)
        self.text, self._max_model_len, self._place, self.asked = text, max_model_len, place, 0
        self.called, self.unwritten, self.reached = "", False, "before the policy is asked"

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """See `Chat.prompt`."""
        self.tools = tools or self.tools
        return super().prompt(messages, tools)

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, seed: int, replica: int
    ) -> list[Completion]:
        """See `Generator.generate`."""
        self.asked += 1
        if self.asked > _MOST or len(token_ids) >= self._max_model_len:
            raise ContextLengthError(f"no room for completion {self.asked} after {len(token_ids)} tokens")
        ids = list[int]()
        if self._place < len(self.tools) and not self.called:
            function = self.tools[self._place]["function"]
            schema, self.called = function.get("parameters") or {}, function["name"]
            known, required = schema.get("properties", {}), schema.get("required", [])
            arguments = json.dumps({name: _value(known.get(name, {})) for name in required})
            ids = self.answer("", [{"function": {"name": self.called, "arguments": arguments}}], self.tools)
            self.unwritten = not ids
        self.reached = f"after a call of {self.called!r}" if ids else f"after the answer {self.text!r}"
        ids = ids or self.answer(self.text)
        return [Completion(ids, [-0.5] * len(ids), [0] * len(ids), "stop")] * gconfig.n


def _value(schema: dict[str, Any]) -> Any:
    return schema["enum"][0] if schema.get("enum") else _VALUES.get(str(schema.get("type")), "1")


def play_scripted(
    config: Config, policy: Sequence[Any], verifier: Verifier, problems: Sequence[Problem], tell: Tell, kept: Rows
) -> list[str]:
    """Play and grade a scripted episode; return what may be wrong, but may be the script's fault.

    The next problem is tried where an episode fails before the policy is asked: one bad problem spoils no run. But
    none is after a deadline, which another machine may keep.

    Args:
        config: of the run.
        policy: the arguments of `Chat`, see `policy_tokenizer`.
        verifier: for environment and scorer.
        problems: some of the run's problems.
        tell: gets the story of the episodes.
        kept: the rows of the last episode are added, as they would be stored.

    Raises:
        ConfigError: all episodes fail before the policy is asked.
        ValueError: template, agent or scorers cannot be used.
        RuntimeError: the agent ends the whole rollout.
    """

    def episode(problem: Problem, place: int) -> tuple[Script, list[Trajectory], str, list[str]]:
        """Play an episode; return also how it ends, and what is wrong with it but for its scores."""
        script = Script(policy, _answer(config, problem), config.inference.max_model_len, place)
        rows = _play(config, problem, script, verifier)
        end = f"{script.reached}: {', '.join(filter(None, (rows[-1].status, rows[-1].reason)))}"
        _tell(script, rows, tell)
        tell(f"the episode of problem {problem.problem_id!r} ends {end}")
        findings = _findings(script, [call for row in rows for call in row.calls])
        return script, rows, end, [*findings, *([end] if rows[-1].status in ("failed", "rejected") else [])]

    for problem in problems:
        script, rows, end, findings = episode(problem, 0)
        if script.asked or rows[-1].fault != "set-up" or rows[-1].latency_s > config.rollout.episode_deadline_s:
            break
    else:
        raise ConfigError(f"an episode of problem {problem.problem_id!r} ends {end}")
    stored = to_table(rows, TRAJECTORY_SCHEMA).to_pylist()
    kept += stored
    for place in range(1, len(script.tools)):
        findings += episode(problem, place)[-1]
    if rows[-1].status in ("failed", "rejected") or config.score.of(problem.source) in BY_MODEL:
        return findings
    scores = [score for _, score in scored(stored, Scorers(config.score, verifier))]
    for score in scores:
        tell(f"scorer, turn {score.turn}: {score.verdict}, reward {score.reward:g} {score.reason}")
    failed = [f"{score.verdict}, {score.reason}" for score in scores if score.verdict in ("error", "timeout")]
    findings += [f"the scorer fails {script.reached}: {why}" for why in failed[:1]]
    if not findings and problem.solutions and all(score.verdict != "correct" for score in scores):
        what = f"{script.text!r}, from the first solution of problem {problem.problem_id!r}"
        findings.append(f"{what}, is not right for the scorer: do your answers have another form?")
    return findings


def _tell(script: Script, rows: Sequence[Trajectory], tell: Tell) -> None:
    for row in rows:
        tell(visible(str(script.tokenizer.decode(row.token_ids)), _LONGEST))
        for call in row.calls:
            output = visible(call.output, _LONGEST)
            tell(f"read as a call: {call.name} {call.arguments} ({call.status}): {output}")
        for turn in row.turns:
            tell(f"verdict while playing: {turn.verdict or 'none'}, reward {turn.reward:g}")


def _findings(script: Script, calls: Sequence[Call]) -> list[str]:
    """Return what is wrong with calls of tools."""
    if script.unwritten:
        return [f"the chat template shows the tool {script.called!r}, but writes no calls of tools"]
    if script.called and all(call.status == "unparsable" for call in calls):
        remedy = "choose what reads completions (agent.args.renderer), or repair the template"
        return [f"a call of {script.called!r}, as the chat template writes it, is not read as a call: {remedy}"]
    return [f"a call of {call.name!r} has failed: {call.output}" for call in calls if call.status == "failed"]


def _answer(config: Config, problem: Problem) -> str:
    """Return the problem's first solution, in a box where math-verify reads it."""
    solution, environment = next(iter(problem.solutions), "1"), config.of_source(problem.source).environment.type
    graded_by = config.score.of(problem.source), environment
    return rf"\boxed{{{solution}}}" if "math-verify" in graded_by else solution


def _play(config: Config, problem: Problem, script: Script, verifier: Verifier) -> list[Trajectory]:
    sampling, rows = config.sampling, list[Trajectory]()
    gconfig = GenerationConfig(1, sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens)
    first = layout.checkpoint(config.run.name, 0)
    plan = RolloutPlan(f"{config.run.name}/check", config, 0, first, "problems/check", gconfig, 1)

    async def groups() -> AsyncIterator[Group]:
        yield plan.group(problem)

    async def play_it() -> None:
        async with open_player(plan, script, script, verifier) as player:
            await collect(player, groups(), 1, lambda _, played: rows.extend(played))

    run_loop(play_it(), freeze=False)
    return rows
