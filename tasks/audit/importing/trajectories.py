"""Make trajectories of another program's episodes, with tokens where they are known or a tokenizer can make them."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from storage.records import Call, Problem, Trajectory, Turn
from tasks.agents.chat import Chat
from tasks.agents.episode import Episode
from tasks.agents.interface import EpisodeSpec
from tasks.audit.importing.rollout import Message, Rollout, Tokens
from tasks.inference.api import BundledGenerationOutputs, Completion
from tasks.problems.columns import as_json
from tasks.problems.messages import MESSAGES
from tasks.problems.problem_set import RowError, key

_AFTER: dict[str, Any] = {"role": "user", "content": "?"}
"""A message after the last completion: the template writes the end of a turn where another message follows."""
_PARTS_OF_CHAT = ("system", "user", "assistant")


@dataclass(slots=True)
class Problems:
    """The problems of a dump by id; rows with the same prompt and gold answers have the same problem."""

    by_id: dict[str, Problem] = field(default_factory=dict)
    _keys: dict[str, str] = field(default_factory=dict)

    def of(self, rollout: Rollout) -> Problem:
        """Return the problem of an episode; another one with the same id gets a part of its key as a suffix.

        Raises:
            RowError: the episode has no prompt.
        """
        before = prompt_of(rollout)
        asked = "\n\n".join(message.text for message in before if message.role != "system")
        if not asked.strip():
            raise RowError("no message comes before the first one of the assistant: there is no prompt")
        chat = [{"role": message.role, "content": message.text} for message in before]
        usual = len(chat) > 1 and chat[-1]["role"] == "user" and all(each["role"] in _PARTS_OF_CHAT for each in chat)
        metadata = as_json(rollout.metadata | ({MESSAGES: chat} if usual else {}))
        problem = Problem("", asked, rollout.golds, rollout.source, metadata)
        own = key(problem)
        name = rollout.problem_id or own[:12]
        if self._keys.setdefault(name, own) != own:
            name = f"{name}~{own[:8]}"
        return self.by_id.setdefault(name, replace(problem, problem_id=name))


def prompt_of(rollout: Rollout) -> list[Message]:
    """Return the messages before the first turn, or all without a turn.

    Raises:
        RowError: there is no turn, and no failure that explains it.
    """
    turns = _turns(rollout)
    if not turns and rollout.status != "failed":
        raise RowError("it has no message of the assistant that the policy wrote")
    return rollout.messages[: turns[0]] if turns else rollout.messages


def _turns(rollout: Rollout) -> list[int]:
    return [number for number, message in enumerate(rollout.messages) if message.sampled]


def lacking(rollout: Rollout) -> Iterator[str]:
    """Yield what an episode lacks, in the words of `tasks.audit.checks.LACKED`."""
    tokens = [message.tokens for message in rollout.messages if message.sampled]
    yield from ("versions", "seeds")  # no format has these
    if not all(tokens):
        yield "tokens"
    if any(each is None or each.logprobs is None for each in tokens):
        yield "logprobs"
    if rollout.status is None:
        yield "ends"
    if not rollout.golds:
        yield "golds"
    if rollout.reward is None:
        yield "rewards"


def with_tokens(rollout: Rollout, chat: Chat) -> Rollout:
    """Render the messages of an episode whose row has no tokens, as the template of `chat` writes them.

    Raises:
        RowError: the template refuses the conversation.
    """
    turns = _turns(rollout)
    if all(rollout.messages[turn].tokens for turn in turns):
        return rollout
    said, messages = [each.for_template for each in rollout.messages], list(rollout.messages)
    for turn, following in zip(turns, [*turns[1:], len(said)], strict=True):
        try:
            prompt = chat.prompt(said[:turn], rollout.tools)
            after = said[:following] if following < len(said) else [*said[: turn + 1], _AFTER]
            rest = chat.prompt(after, rollout.tools)
        except ValueError as error:
            raise RowError(str(error)) from None
        ids = rest[len(prompt) :] if rest[: len(prompt)] == prompt else chat.encode(said[turn]["content"])
        end = next((number for number, token in enumerate(ids, 1) if token in chat.stop_token_ids), len(ids))
        cut = following == len(said) and rollout.status == "truncated"
        messages[turn] = replace(messages[turn], tokens=Tokens(prompt, ids[: end - cut], None))
    return replace(rollout, messages=messages)


def to_trajectory(rollout: Rollout, record: Trajectory, chat: Chat | None) -> Trajectory:
    """Add the turns of an episode to its record, and its tokens if they are known for every turn.

    The reward is that of the last turn. Earlier turns answer nothing, unless they have rewards of their own. Without
    reward and gold answer the last one answers nothing either, since nobody can grade it.
    """
    positions = _turns(rollout)
    said = [rollout.messages[position] for position in positions]
    turns = [_turn(rollout, position, chat) for position in positions]
    record = replace(record, status=rollout.status or "completed", reason=rollout.reason)
    if turns and all(message.tokens for message in said):
        record = _columns(record, said, turns)
        turns = [replace(turn, start=made.start, end=made.end) for turn, made in zip(turns, record.turns, strict=True)]
    graded = [message.reward is not None for message in said]
    if turns:
        graded[-1] = graded[-1] or rollout.reward is not None or bool(rollout.golds)
    return replace(
        record,
        turns=turns,
        calls=list(_calls(rollout.messages, positions)),
        ungraded=[turn for turn, is_graded in enumerate(graded) if not is_graded],
        reward_parts=[*({} for _ in turns[1:]), rollout.parts] if turns and rollout.parts else [],
        unplayed_turns=0 if record.status == "completed" else -1,
        fault="set-up" if record.status == "failed" else "",
    )


def _turn(rollout: Rollout, position: int, chat: Chat | None) -> Turn:
    """Return a turn without tokens."""
    message, rest = rollout.messages[position], rollout.messages[position + 1 :]
    is_last = not any(each.sampled for each in rest)
    following = next((number for number, each in enumerate(rest) if each.sampled), len(rest))
    reward = rollout.reward if is_last and rollout.reward is not None else message.reward
    text = message.text
    if chat and message.tokens and message.calls:  # the message has only a part of what was sampled
        text = chat.decode(message.tokens.completion_ids)
    finish_reason = "length" if is_last and rollout.status == "truncated" else "stop" if rollout.status else ""
    feedback = "\n".join(each.text for each in rest[:following])
    verdict = "" if rollout.parts or reward not in (0, 1) else "correct" if reward else "wrong"
    return Turn(0, 0, text, verdict, reward or 0.0, finish_reason, feedback, latency_s=0.0, seed=0)


def _columns(record: Trajectory, said: Sequence[Message], turns: Sequence[Turn]) -> Trajectory:
    """Fill the columns of tokens: a completion whose prompt does not continue the tokens before it begins a sequence."""
    episode: Episode | None = None
    for message, turn in zip(said, turns, strict=True):
        assert message.tokens
        prompt, ids, logprobs = message.tokens.prompt_ids, message.tokens.completion_ids, message.tokens.logprobs
        if episode is None:
            episode = Episode(EpisodeSpec(record.trajectory_id, Problem("", "", []), 0, record), prompt)
        elif prompt[: len(episode.prompt_ids)] == episode.prompt_ids:
            episode.add_feedback("", prompt[len(episode.prompt_ids) :])
        else:
            episode.start_sequence("", prompt)
        unknown: list[Any] = [None] * len(ids)
        completion = Completion(ids, unknown if logprobs is None else logprobs, [-1] * len(ids), turn.finish_reason)
        episode.add_completion(BundledGenerationOutputs("", prompt, [completion], [0], 0.0), turn.text)
    assert episode
    return episode.trajectory(1.0, record.status, record.reason)


def _calls(messages: Sequence[Message], positions: Sequence[int]) -> Iterator[Call]:
    """Yield the calls of all turns with their outputs: an output answers the call with its id, or the next one."""
    for turn, position in enumerate(positions):
        following = next((each for each in positions[turn + 1 :]), len(messages))
        outputs = [message for message in messages[position + 1 : following] if message.role == "tool"]
        for call in messages[position].calls:
            output = next((each for each in outputs if each.call_id in ("", call["id"])), None)
            if output:
                outputs.remove(output)
            function, status = call["function"], "answered" if output else "unanswered"
            yield Call(turn, call["id"], function["name"], function["arguments"], output.text if output else "", status)
