"""Make trajectories of another program's episodes, with tokens where they are known or a tokenizer can make them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from storage.records import Call, Problem, Trajectory, Turn
from tasks.agents.chat import Chat
from tasks.agents.episode import Episode
from tasks.agents.interface import EpisodeSpec
from tasks.audit.importing.rollout import Message, Rollout
from tasks.inference.api import BundledGenerationOutputs, Completion
from tasks.problems.columns import as_json
from tasks.problems.messages import MESSAGES
from tasks.problems.problem_set import key

_AFTER: dict[str, Any] = {"role": "user", "content": "?"}
"""A message after the last completion: templates write the end of a turn where another message follows."""


@dataclass(slots=True)
class Problems:
    """The problems of a dump by id; rows with the same prompt and gold answers have the same problem."""

    by_id: dict[str, Problem] = field(default_factory=dict)
    _keys: dict[str, str] = field(default_factory=dict)

    def of(self, rollout: Rollout) -> Problem:
        """Return the problem of an episode; another one with the same id gets a part of its key as a suffix.

        Raises:
            RowError: its metadata cannot be written as JSON.
        """
        chat = [{"role": each.role, "content": each.text} for each in rollout.prompt]
        usual = len(chat) > 1 and chat[-1]["role"] == "user" and "tool" not in [each["role"] for each in chat]
        asked = "\n\n".join(each["content"] for each in chat if each["role"] != "system")
        metadata = as_json(rollout.metadata | ({MESSAGES: chat} if usual else {}))
        problem = Problem("", asked, rollout.golds, rollout.data_source, metadata)
        own = key(problem)
        name = rollout.id or own[:12]
        if self._keys.setdefault(name, own) != own:
            name = f"{name}~{own[:8]}"
        return self.by_id.setdefault(name, replace(problem, problem_id=name))


def lacking(rollout: Rollout) -> set[str]:
    """Return what an episode lacks, in the words of `tasks.audit.checks.LACKED`."""
    turns = [rollout.messages[turn] for turn in rollout.turns]
    there = {
        "tokens": all(each.token_ids and each.prompt_token_ids for each in turns),
        "logprobs": all(each.logprobs for each in turns),
        "ends": rollout.status,
        "golds": rollout.golds,
        "rewards": rollout.reward is not None,
    }
    return {"versions", "seeds", *(name for name, value in there.items() if not value)}  # no format has these two


def with_tokens(rollout: Rollout, chat: Chat) -> Rollout:
    """Return an episode with the tokens that the template of `chat` makes of its messages, unless it has tokens.

    Raises:
        ValueError: the template refuses the conversation.
    """
    turns, messages = rollout.turns, list(rollout.messages)
    if all(messages[turn].token_ids for turn in turns):
        return rollout
    said = [each.for_template for each in messages]
    for turn, following in zip(turns, [*turns[1:], len(said)], strict=True):
        prompt = chat.prompt(said[:turn], rollout.tools)
        longer = said[:following] if following < len(said) else [*said[: turn + 1], _AFTER]
        ids = chat.prompt(longer, rollout.tools)
        ids = ids[len(prompt) :] if ids[: len(prompt)] == prompt else chat.encode(messages[turn].text)
        end = next((number for number, token in enumerate(ids, 1) if token in chat.stop_token_ids), len(ids))
        cut = turn == turns[-1] and rollout.status == "truncated"
        found = {"prompt_token_ids": prompt, "token_ids": ids[: end - cut], "logprobs": None}
        messages[turn] = messages[turn].model_copy(update=found)
    return rollout.model_copy(update={"messages": messages})


def to_trajectory(rollout: Rollout, record: Trajectory, chat: Chat | None) -> Trajectory:
    """Add the turns of an episode to its record, and its tokens if they are known for every turn.

    The reward is that of the last turn. Earlier turns answer nothing, unless they have rewards of their own. Without
    reward and gold answer the last one answers nothing either, since nobody can grade it.
    """
    said = [rollout.messages[turn] for turn in rollout.turns]
    record = replace(record, status=rollout.status or "completed", reason=rollout.reason)
    graded = [each.reward is not None for each in said[:-1]] + [rollout.reward is not None or bool(rollout.golds)]
    turns = [_turn(rollout, number, chat) for number in range(len(said))]
    if turns and "tokens" not in lacking(rollout):
        record = _columns(record, said, turns)
        turns = [replace(turn, start=made.start, end=made.end) for turn, made in zip(turns, record.turns, strict=True)]
    return replace(
        record,
        turns=turns,
        calls=list(_calls(rollout)),
        ungraded=[number for number, is_graded in enumerate(graded[: len(turns)]) if not is_graded],
        reward_parts=[*({} for _ in turns[1:]), rollout.parts] if turns and rollout.parts else [],
        unplayed_turns=0 if record.status == "completed" else -1,
        fault="set-up" if record.status == "failed" else "",
    )


def _after(rollout: Rollout, number: int) -> list[Message]:
    """Return the messages between a turn and the next one."""
    begin, *following = [*rollout.turns, len(rollout.messages)][number:]
    return rollout.messages[begin + 1 : following[0]]


def _turn(rollout: Rollout, number: int, chat: Chat | None) -> Turn:
    """Return a turn without tokens."""
    message, is_last = rollout.messages[rollout.turns[number]], number == len(rollout.turns) - 1
    reward = rollout.reward if is_last and rollout.reward is not None else message.reward
    right = rollout.parts.get("correct") if rollout.parts and is_last else reward
    verdict = {0.0: "wrong", 1.0: "correct"}.get(-1.0 if right is None else right, "")
    text = message.text
    if chat and message.token_ids and message.calls:  # the message has only a part of what was sampled
        text = chat.decode(message.token_ids)
    finish_reason = "length" if is_last and rollout.status == "truncated" else "stop" if rollout.status else ""
    feedback = "\n".join(each.text for each in _after(rollout, number))
    return Turn(0, 0, text, verdict, reward or 0.0, finish_reason, feedback, latency_s=0.0, seed=0)


def _columns(record: Trajectory, said: Sequence[Message], turns: Sequence[Turn]) -> Trajectory:
    """Fill the columns of tokens. A prompt that does not continue the tokens before it begins a sequence."""
    first = said[0].prompt_token_ids or []
    episode = Episode(EpisodeSpec(record.trajectory_id, Problem("", "", []), 0, record), first)
    for message, turn in zip(said, turns, strict=True):
        prompt, ids = message.prompt_token_ids or [], message.token_ids or []
        if turn is not turns[0] and prompt[: len(episode.prompt_ids)] == episode.prompt_ids:
            episode.add_feedback("", prompt[len(episode.prompt_ids) :])
        elif turn is not turns[0]:
            episode.start_sequence("", prompt)
        logprobs: list[Any] = message.logprobs or [None] * len(ids)
        completion = Completion(ids, logprobs, [-1] * len(ids), turn.finish_reason)
        episode.add_completion(BundledGenerationOutputs("", prompt, [completion], [0], 0.0), turn.text)
    return episode.trajectory(1.0, record.status, record.reason)


def _calls(rollout: Rollout) -> Iterator[Call]:
    """Yield the calls of all turns with their outputs: an output answers the call with its id, or the next one."""
    for number, turn in enumerate(rollout.turns):
        outputs = [each for each in _after(rollout, number) if each.role == "tool"]
        for call in rollout.messages[turn].calls:
            answer = next((each for each in outputs if each.tool_call_id in (None, "", call.id)), None)
            if answer:
                outputs.remove(answer)
            said = answer.text if answer else ""
            yield Call(number, call.id, call.name, call.arguments, said, "answered" if answer else "unanswered")
