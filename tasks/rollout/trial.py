"""A scripted episode: do agent, environment, tools, template and scorer of a configuration play together?

It needs no policy, only its tokenizer, and is played and graded by the code of all episodes. The script calls the first
tool that the agent offers, as the chat template writes calls, and then gives the problem's first solution. Policies
say other things: what fails before the first completion fails for all of them, what fails later may be the script's
fault.
"""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from configs import Config
from storage import layout
from storage.records import TRAJECTORY_SCHEMA, Problem, Trajectory, to_table
from storage.visible import visible
from tasks.agents.chat import Chat
from tasks.inference.api import Completion, ContextLengthError, GenerationConfig
from tasks.rollout.plan import Group, RolloutPlan
from tasks.rollout.play import run_loop
from tasks.rollout.workers import open_collector
from tasks.score.scorers import Scorers
from tasks.score.scoring import scores_of
from tasks.score.verifier import Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST = 32
"""Most completions of the episode: some agents ask until the context is full."""
_LONGEST = 3000  # characters of a text in the story
_VALUES: dict[str, Any] = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
"""What the script gives for an argument, by its type in the tool's schema; "1" for others."""

Tools = Sequence[dict[str, Any]]


@dataclass
class Trial:
    """What scripted episodes showed.

    Attributes:
        story: the episodes, line by line, for people.
        findings: what may be wrong; the script may be to blame for it.
        refusal: what fails before any policy has said a word; "" if nothing does.
        played: whether an episode came to its end, and its scorer to verdicts.
        seconds: how long each part took.
    """

    story: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    refusal: str = ""
    played: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the block to that of a part."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started


class WatchedChat(Chat):
    """A chat that notes which tools were offered in which prompt, by its ids."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", vocabulary: int | None, ends: Sequence[int]) -> None:
        super().__init__(tokenizer, vocabulary, ends)
        self.offered: dict[tuple[int, ...], Tools] = {}

    def prompt(self, messages: Sequence[dict[str, Any]], tools: Tools = ()) -> list[int]:
        """See `Chat.prompt`."""
        ids = super().prompt(messages, tools)
        self.offered[tuple(ids)] = tools
        return ids


@dataclass
class ScriptedPolicy:
    """An engine that says `text` each time; if it is `calling`, it first calls the first tool that it is offered.

    Attributes:
        called: the tool that it has called.
        unwritten: the tool that it cannot call, since the template writes no calls.
    """

    chat: WatchedChat
    text: str
    calling: bool
    max_model_len: int
    asked: int = 0
    called: str = ""
    unwritten: str = ""
    replicas: int = 1

    async def generate(
        self, token_ids: list[int], gconfig: GenerationConfig, seed: int, replica: int
    ) -> list[Completion]:
        """See `Generator.generate`."""
        self.asked += 1
        if self.asked > _MOST or len(token_ids) >= self.max_model_len:
            raise ContextLengthError(f"no room for completion {self.asked} after {len(token_ids)} tokens")
        tools = self.chat.offered.get(tuple(token_ids), ())
        ids = self._call(tools) if self.calling and tools and not self.called else []
        ids = ids or self.chat.answer(self.text)
        return [Completion(ids, [-0.5] * len(ids), [0] * len(ids), "stop")] * gconfig.n

    def _call(self, tools: Tools) -> list[int]:
        name, schema = tools[0]["function"]["name"], tools[0]["function"].get("parameters") or {}
        known = schema.get("properties", {})
        ids = self.chat.call(name, {each: _value(known.get(each, {})) for each in schema.get("required", [])}, tools)
        self.called, self.unwritten = (name, "") if ids else ("", name)
        return ids


def _value(schema: dict[str, Any]) -> Any:
    return schema["enum"][0] if schema.get("enum") else _VALUES.get(str(schema.get("type")), "1")


@dataclass
class Scripted:
    """What scripted episodes are made of; `play` plays those of some problems.

    Args:
        config: of the run.
        chat: of the policy.
        verifier: for environment and scorer.
        trial: gets what is found.
    """

    config: Config
    chat: WatchedChat
    verifier: Verifier
    trial: Trial

    def play(self, problems: Sequence[Problem]) -> None:
        """Play and grade an episode of the first problem.

        The next one is tried where an episode ends before the policy is asked: one bad problem spoils no run.

        Raises:
            ValueError: the agent or a scorer cannot be made.
            RuntimeError: the agent ends the whole rollout.
        """
        trial, deadline = self.trial, self.config.rollout.episode_deadline_s
        for problem in problems:
            policy, rows = self._episode(problem, calling=True)
            began, late = any(any(row.action_mask) for row in rows), rows[0].latency_s > deadline
            if began or late:
                break
        if not began:
            told = f"the agent got no completion in an episode of problem {problem.problem_id!r}: {_end(rows)}"
            if _failed(rows) and not late:
                trial.refusal = told
            else:
                trial.findings.append(told)
            return
        if (policy.called or policy.unwritten) and not self._calls_work(policy, rows):
            policy, rows = self._episode(problem, calling=False)
        if _failed(rows):
            trial.findings.append(f"after the answer {policy.text!r}: {_end(rows)}")
        else:
            self._grade(rows, policy.text)

    def _calls_work(self, policy: ScriptedPolicy, rows: Sequence[Trajectory]) -> bool:
        """Note what is wrong with calls of tools; return whether the episode went on after its call."""
        findings = []
        if policy.unwritten:
            findings.append(f"the chat template shows the tool {policy.unwritten!r}, but writes no calls of tools")
        elif all(call.status == "unparsable" for row in rows for call in row.calls):
            findings.append(
                f"a call of {policy.called!r}, as the chat template writes it, is not read as a call: choose what "
                "reads completions (agent.args.renderer), or repair the template"
            )
        elif _failed(rows):
            findings.append(f"after a call of {policy.called!r}: {_end(rows)}")
        self.trial.findings += findings
        failed = [call.output for row in rows for call in row.calls if call.status == "failed"]
        self.trial.findings += [f"a call of {policy.called!r} has failed: {output}" for output in failed]
        return not findings

    def _episode(self, problem: Problem, *, calling: bool) -> tuple[ScriptedPolicy, list[Trajectory]]:
        """Play one episode, and tell it."""
        config, sampling, rows = self.config, self.config.sampling, list[Trajectory]()
        gconfig = GenerationConfig(1, sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens)
        first = layout.checkpoint(config.run.name, 0)
        plan = RolloutPlan(f"{config.run.name}/check", config, 0, first, "problems/check", gconfig, 1)
        policy = ScriptedPolicy(self.chat, self._answer(problem), calling, config.inference.max_model_len)

        async def groups() -> AsyncIterator[Group]:
            yield plan.group(problem)

        async def collect() -> None:
            async with open_collector(plan, policy, self.chat, self.verifier) as collector:
                await collector.collect(groups(), 1, lambda _, played: rows.extend(played))

        with self.trial.timed("agent, environment and tools"):
            run_loop(collect(), freeze=False)
        self.trial.story += [f"problem {problem.problem_id!r}", *_told(rows, self.chat)]
        return policy, rows

    def _answer(self, problem: Problem) -> str:
        """Return the problem's first solution, in a box where math-verify reads it."""
        by_source, solution = self.config.score.by_source, next(iter(problem.solutions), "1")
        graded_by = by_source.get(problem.source, by_source["default"]), self.config.environment.type
        return rf"\boxed{{{solution}}}" if "math-verify" in graded_by else solution

    def _grade(self, rows: Sequence[Trajectory], answer: str) -> None:
        """Let the scorer grade an episode as it would be stored."""
        with self.trial.timed("scorer"):
            stored = to_table(list(rows), TRAJECTORY_SCHEMA).to_pylist()
            scores = list(scores_of(stored, Scorers(self.config.score, self.verifier)))
        for score in scores:
            why = f" ({score.reason})" if score.reason else ""
            self.trial.story.append(f"scorer, turn {score.turn}: {score.verdict}{why}, reward {score.reward:g}")
        failed = [score for score in scores if score.verdict in ("error", "timeout")]
        self.trial.played = not failed
        if failed:
            self.trial.findings.append(f"the scorer fails on {answer!r}: {failed[0].verdict}, {failed[0].reason}")
        elif rows[0].solutions and all(score.verdict != "correct" for score in scores):
            self.trial.findings.append(
                f"{answer!r}, from the problem's first solution, is not right for the scorer: do your answers have "
                "another form?"
            )


def _failed(rows: Sequence[Trajectory]) -> bool:
    return any(row.fault == "set-up" for row in rows)


def _end(rows: Sequence[Trajectory]) -> str:
    return ", ".join(filter(None, (rows[-1].status, rows[-1].reason)))


def _told(rows: Sequence[Trajectory], chat: WatchedChat) -> Iterator[str]:
    """Tell what happened in an episode, line by line."""
    for row in rows:
        first = tuple(row.token_ids[: row.turns[0].start]) if row.turns else ()
        if first:
            yield f"prompt ({len(first)} tokens): {_shown(chat.tokenizer.decode(list(first)))}"
            tools = [tool["function"]["name"] for tool in chat.offered.get(first, ())]
            yield f"tools offered: {', '.join(tools) or 'none'}"
        for number, turn in enumerate(row.turns):
            yield f"the script says: {_shown(chat.completion_text(row.token_ids[turn.start : turn.end]))}"
            calls = [call for call in row.calls if call.turn == number]
            for call in calls:
                yield f"  read as a call: {call.name} {call.arguments} ({call.status}): {_shown(call.output)}"
            if turn.verdict:
                yield f"  verdict while playing: {turn.verdict}, reward {turn.reward:g}"
            if turn.feedback and not calls:
                yield f"  told in return: {_shown(turn.feedback)}"
    yield f"the episode ends: {_end(rows)}"


def _shown(text: Any) -> str:
    return visible(str(text), _LONGEST)
