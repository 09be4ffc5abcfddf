"""Make trajectories of another program's episodes, with tokens where they are known or a tokenizer can make them."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from storage.records import Call, Problem, Trajectory
from tasks.agents.chat import Chat
from tasks.agents.episode import Episode
from tasks.agents.interface import EpisodeSpec
from tasks.audit.importing.rollout import Rollout
from tasks.inference.api import BundledGenerationOutputs, Completion
from tasks.problems.columns import as_json
from tasks.problems.messages import MESSAGES
from tasks.problems.problem_set import key

_AFTER: dict[str, Any] = {"role": "user", "content": "?"}
"""A message after the last completion: templates write the end of a turn where another message follows."""
_UNKNOWN: dict[str, Any] = {"policy": "", "policy_version": -1, "seed": 0, "started_at": 0.0, "latency_s": 0.0}
_UNKNOWN |= {"sampling": "{}", "environment_args": "{}", "turn_discount": 1.0, "status": "completed", "reason": ""}
_UNKNOWN |= {column: [] for column in ("token_ids", "action_mask", "logprobs", "versions", "turns")}


def problem_of(rollout: Rollout) -> Problem:
    """Return the problem of an episode. Its id has digits of its key: rows may give one id to several problems.

    Raises:
        RowError: its metadata cannot be written as JSON.
    """
    chat = [{"role": each.role, "content": each.text} for each in rollout.prompt]
    asked = "\n\n".join(each["content"] for each in chat if each["role"] != "system")
    metadata = as_json(rollout.metadata | ({MESSAGES: chat} if len(chat) > 1 else {}))
    problem = Problem("", asked, rollout.golds, rollout.data_source, metadata)
    return replace(problem, problem_id=f"{rollout.id}~{key(problem)[:12]}".lstrip("~"))


def add_tokens(rollout: Rollout, chat: Chat) -> None:
    """Add the tokens that the template of `chat` makes of the messages, unless there are tokens.

    Raises:
        ValueError: the template refuses the conversation.
    """
    said = [each.model_dump(include={"role", "tool_calls"}, exclude_none=True) for each in rollout.messages]
    said = [message | {"content": each.text} for message, each in zip(said, rollout.messages, strict=True)]
    is_known = "tokens" not in rollout.lacks
    for turn in rollout.turns:
        message = rollout.messages[turn]
        if not is_known and rollout.rendered:
            message.prompt_token_ids = chat.encode(rollout.prompt[0].content)
            message.token_ids = chat.encode(message.text)
        elif not is_known:
            prompt = chat.prompt(said[:turn], rollout.tools)
            after = said[turn + 1 :][: len(rollout.following(turn))] or [_AFTER]
            ids = chat.prompt([*said[: turn + 1], *after], rollout.tools)
            ids = ids[len(prompt) :] if ids[: len(prompt)] == prompt else chat.answer(message.text)
            end = next((number for number, token in enumerate(ids, 1) if token in chat.stop_token_ids), len(ids))
            is_cut = turn == rollout.turns[-1] and rollout.status == "truncated"
            message.prompt_token_ids, message.token_ids, message.logprobs = prompt, ids[: end - is_cut], None
        if message.tool_calls:  # the message has only a part of what was sampled
            message.content, message.reasoning_content = chat.decode(message.token_ids or []), None


def to_trajectory(rollout: Rollout, samples: Counter[str], run: str, problem_set: str, form: str) -> Trajectory:
    """Return the record of an episode, with its tokens if they are known; `samples` counts those of each problem.

    The reward is that of the last turn; earlier turns answer nothing. Without reward and gold answer the last one
    answers nothing either, since nobody can grade it. A prompt that does not continue the tokens before it begins a
    sequence.
    """
    problem = problem_of(rollout)
    group = f"{run}/{rollout.step:06d}/{problem.problem_id}"
    samples[group] += 1
    record = Trajectory(
        trajectory_id=f"{group}/{samples[group] - 1}",
        run=run,
        iteration=rollout.step,
        sample=samples[group] - 1,
        problem_set=problem_set,
        agent="imported",
        agent_args=json.dumps({"format": form, "row": rollout.row}),
        environment="imported",
        **asdict(problem),
        **_UNKNOWN,
    )
    status, turns = rollout.status or "completed", [rollout.messages[turn] for turn in rollout.turns]
    prompts = [each.prompt_token_ids or [] for each in turns]
    episode = Episode(EpisodeSpec(record.trajectory_id, problem, 0, record), prompts[0] if prompts else [])
    for number, (position, turn) in enumerate(zip(rollout.turns, turns, strict=True), 1):
        is_cut = number == len(turns) and status == "truncated"
        finish_reason, ids = "length" if is_cut else "stop" if rollout.status else "", turn.token_ids or []
        logprobs: list[Any] = turn.logprobs or [None] * len(ids)
        completion = Completion(ids, logprobs, [-1] * len(ids), finish_reason)
        sampled = BundledGenerationOutputs("", episode.prompt_ids, [completion], [0], 0.0)
        episode.add_completion(sampled, turn.text)
        feedback = "\n".join(each.text for each in rollout.following(position))
        so_far = episode.prompt_ids
        prompt = prompts[number] if number < len(turns) else so_far
        if prompt[: len(so_far)] == so_far:
            episode.add_feedback(feedback, prompt[len(so_far) :])
        else:
            episode.start_sequence(feedback, prompt)
    if turns:
        right = rollout.parts.get("correct", rollout.reward)
        verdict = {None: "", 0.0: "wrong", 1.0: "correct"}.get(right, "")
        episode.set_verdict(verdict, rollout.reward or 0.0, rollout.parts)
    is_graded = rollout.reward is not None or bool(rollout.golds)
    return replace(
        episode.trajectory(1.0, status, rollout.reason, 0 if status == "completed" else -1),
        calls=list(_calls(rollout)),
        ungraded=list(range(len(turns) - is_graded)),
        fault="set-up" if status == "failed" else "",
    )


def _calls(rollout: Rollout) -> Iterator[Call]:
    """Yield the calls of all turns with their outputs: an output answers the call with its id, or the next one."""
    for number, turn in enumerate(rollout.turns):
        outputs = [each for each in rollout.following(turn) if each.role == "tool"]
        for call in rollout.messages[turn].tool_calls or ():
            answer = next((each for each in outputs if each.tool_call_id in (None, "", call.id)), None)
            if answer:
                outputs.remove(answer)
            asked = (number, call.id, call.function.name, call.function.arguments)
            yield Call(*asked, answer.text, "answered") if answer else Call(*asked, "", "unanswered")
