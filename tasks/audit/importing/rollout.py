"""An episode of another program: how the row of a dump is read (`FORMATS`), and the trajectory that is made of it.

Validation refuses what cannot be stored. These are the formats, as the programs write them:

messages         `messages`, or `prompt` and `completion`, and if you like `answer`, `reward` (or a number, or true or
                 false, as `score`, `label` or `thumb`), `id`, `step`, `truncated`, `tools`, `data_source`, `metadata`;
                 an assistant's message may have `prompt_token_ids`, `token_ids` and `logprobs`
openai-finetune  the same: `messages` with `tool_calls` and `weight`, and `tools`
verifiers        `results.jsonl`; with tokens if the state column `trajectory` was saved
verl             what `trainer.rollout_data_dir` and `trainer.validation_data_dir` hold: one text for all turns
trl              the files of `log_completions=True`: one text for all turns, a column for each reward function
"""

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from configs.loader import explain
from storage.records import HIGHEST_LOGPROB, LOWEST_LOGPROB, Call, Problem, Status, Trajectory, Turn
from tasks.agents.answers import read_arguments
from tasks.agents.chat import Chat
from tasks.agents.endpoint.protocol import Message as ChatMessage
from tasks.agents.endpoint.tree import number_calls
from tasks.problems.problem_set import Row, RowError, key
from tasks.problems.rows import MESSAGES, as_json, solutions
from tasks.thoughts import opened_by

_Number = Annotated[float, Field(ge=-3e38, le=3e38)]
"""Finite in 32 bits."""
_Ids = list[Annotated[int, Field(ge=0, lt=2**31)]]


def _joined(content: Any) -> Any:
    """Join parts of text; parts of another type, such as images, are left to validation, which refuses them."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "\n".join(str(part.get("text")) for part in content)
    return "" if content is None else content


def _without_nulls(value: Any) -> Any:
    """Remove members that are null: Arrow gives every struct of a column the members of all others.

    >>> _without_nulls({"a": 1, "b": None, "c": [{"d": None}, None]})
    {'a': 1, 'c': [{}, None]}
    """
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(member) for member in value] if isinstance(value, list) else value


def _objects(given: Any) -> list[Any]:
    """Return the objects in a list; some programs write the list, or each object, as a text of JSON."""
    listed = json.loads(given) if isinstance(given, str) and given else given
    return [json.loads(each) if isinstance(each, str) else _without_nulls(each) for each in listed or ()]


def _as_tools(given: Any) -> list[dict[str, Any]]:
    """Return tools as in OpenAI's chat completions; some programs write functions alone."""
    tools = [each if "function" in each else {"type": "function", "function": each} for each in _objects(given)]
    if not all(isinstance(of, dict) and isinstance(of.get("name"), str) for of in (each["function"] for each in tools)):
        raise ValueError("a tool has no function with a name")
    return tools


def _as_calls(given: Any) -> list[dict[str, Any]]:
    """Return calls as in OpenAI's chat completions; some programs write them without `function`."""
    made = list[dict[str, Any]]()
    for call in _objects(given):
        function = call.get("function", call)
        stated = function.get("arguments", "{}")
        text = stated if isinstance(stated, str) else json.dumps(stated, ensure_ascii=False)
        if not isinstance(function.get("name"), str):
            raise ValueError("a call has no function with a name")
        made.append({"id": str(call.get("id") or ""), "function": {"name": function["name"], "arguments": text}})
    return made


class Message(BaseModel):
    """One message, as in OpenAI's chat completions and its files for fine-tuning; other keys are ignored.

    Example: Message(role="assistant", content="3", token_ids=[7, 8], prompt_token_ids=[5, 6], logprobs=[-0.4, -0.1])
    """

    model_config = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False)

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda given: {"developer": "system", "function": "tool"}.get(str(given), given)),
    ]
    content: Annotated[str, BeforeValidator(_joined)] = ""
    reasoning_content: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], BeforeValidator(_as_calls)] = []
    # Of a tool's message: the call that it answers.
    tool_call_id: Annotated[str, BeforeValidator(lambda given: given or "")] = ""
    weight: float | None = None  # 0: the assistant's message is no turn, but context, which is not trained on
    prompt_token_ids: _Ids | None = None  # the whole prompt of this completion, as vLLM returns it
    token_ids: _Ids | None = None  # N
    logprobs: list[Annotated[float, Field(ge=LOWEST_LOGPROB, le=HIGHEST_LOGPROB)]] | None = None  # N

    @model_validator(mode="before")
    @classmethod
    def _as_tool_call(cls, given: Any) -> Any:
        """Read `function_call`, in whose place `tool_calls` came."""
        old = given.get("function_call") if isinstance(given, dict) else None
        return given | {"tool_calls": [old]} if old else given

    @property
    def text(self) -> str:
        """The content, with the thoughts before it."""
        thoughts = f"<think>\n{self.reasoning_content}\n</think>\n\n" if self.reasoning_content else ""
        return thoughts + self.content


class Rollout(BaseModel):
    """One episode. The messages before the first turn are the prompt.

    Example: Rollout(messages=[Message(role="user", content="1 + 2?"), Message(role="assistant", content="3")],
    reward=1.0, golds=["3"])
    """

    model_config = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False)

    messages: list[Message]
    rendered: bool = False  # whether the prompt is one text, as the chat template made it
    reward: _Number | None = None  # of the whole episode
    parts: dict[str, _Number] = {}  # of the reward
    golds: list[str] = []
    id: str = ""  # of the problem
    step: Annotated[int, Field(ge=0, lt=10**6)] = 0  # of the training; each step becomes a data set
    data_source: str = ""
    metadata: dict[str, Any] = {}
    tools: Annotated[list[dict[str, Any]], BeforeValidator(_as_tools)] = []  # as in OpenAI's chat completions
    status: Status | None = None  # None: the dump does not say how it ended
    reason: str = ""  # why the status is not `completed`
    row: str = ""  # where it was read

    @model_validator(mode="after")
    def _has_turns(self) -> Self:
        """Check that somebody asks and the policy answers; drop tokens unless all turns have them."""
        if not self.places and self.status != "failed":
            raise ValueError("no message is the policy's: one of the assistant, with another weight than 0")
        if not any(message.content.strip() and message.role != "system" for message in self.prompt):
            raise ValueError("no message asks something before the first turn")
        for turn in self.turns:
            if turn.logprobs and len(turn.logprobs) != len(turn.token_ids or ()):
                raise ValueError(f"a turn has {len(turn.token_ids or ())} token_ids and {len(turn.logprobs)} logprobs")
        if not all(turn.token_ids and turn.prompt_token_ids for turn in self.turns):
            for turn in self.turns:
                turn.prompt_token_ids = turn.token_ids = turn.logprobs = None
        return self

    @property
    def places(self) -> list[int]:
        """The positions of the turns among the messages."""
        return [at for at, each in enumerate(self.messages) if each.role == "assistant" and each.weight != 0]

    @property
    def turns(self) -> list[Message]:
        return [self.messages[place] for place in self.places]

    @property
    def prompt(self) -> list[Message]:
        return self.messages[: self.places[0]] if self.places else self.messages

    @property
    def replies(self) -> list[list[Message]]:
        """The messages after each turn, up to the next one."""
        return [self.messages[one + 1 : other] for one, other in pairwise([*self.places, len(self.messages)])]

    @property
    def lacks(self) -> set[str]:
        """Words of `tasks.tables.sets.LACKED` for what the episode lacks. No format has versions and seeds."""
        there = {
            "tokens": all(turn.token_ids for turn in self.turns),
            "logprobs": all(turn.logprobs for turn in self.turns),
            "ends": self.status,
            "golds": self.golds,
            "rewards": self.reward is not None,
        }
        return {"versions", "seeds", *(name for name, value in there.items() if not value)}


Fields = dict[str, Any]
"""Fields of a `Rollout`, which are still to be validated."""


def _messages(row: Row) -> Fields:
    names = ("messages", "reward", "id", "data_source", "metadata", "tools")
    cut = {None: None, True: "truncated", False: "completed"}[row.get("truncated")]
    reason = "the row says so" if cut == "truncated" else ""
    given = {name: row[name] for name in names if row.get(name) is not None}
    given.setdefault("messages", [each for part in _asked_and_said(row) for each in part])
    rewards = (row.get(name) for name in ("score", "label", "thumb"))
    given.setdefault("reward", next((each for each in rewards if isinstance(each, int | float)), None))
    return {"golds": _golds(row, "answer"), "status": cut, "reason": reason, **given}


def _verifiers(row: Row) -> Fields:
    """Read a `RolloutOutput`: prompt and completion are messages or texts, `metrics` what the reward functions gave."""
    prompt, completion = _asked_and_said(row)
    steps, assistant = row.get("trajectory") or [], [each for each in completion if each.get("role") == "assistant"]
    for message, step in zip(assistant, steps, strict=False) if len(steps) == len(assistant) else ():
        tokens = step.get("tokens") or {}
        message["prompt_token_ids"], message["token_ids"] = tokens.get("prompt_ids"), tokens.get("completion_ids")
        message["logprobs"] = tokens.get("completion_logprobs")
    status = "failed" if row.get("error") else "truncated" if row.get("is_truncated") else "completed"
    return {
        "messages": [*prompt, *completion],
        "reward": row.get("reward"),
        "parts": _numbers(row.get("metrics") or {}),
        "golds": _golds(row, "answer"),
        "id": row.get("example_id", ""),
        "metadata": {"info": row["info"]} if row.get("info") else {},
        "tools": row.get("tool_defs") or [],
        "status": status,
        "reason": "" if status == "completed" else str(row.get("error_chain") or row.get("stop_condition"))[:1000],
    }


def _asked_and_said(row: Row) -> tuple[list[Row], list[Row]]:
    """Return the messages of prompt, which are no turns, and completion; each may be a text."""
    prompt, completion = (
        [{"role": role, "content": row[name]}] if isinstance(row.get(name), str) else row.get(name) or []
        for name, role in (("prompt", "user"), ("completion", "assistant"))
    )
    return [each | {"weight": 0} for each in prompt], completion


def _verl(row: Row) -> Fields:
    """Read what `_dump_generations` writes: input, output, gts, score, step, and what the reward function returned."""
    parts = _numbers({name: value for name, value in row.items() if name not in ("score", "reward", "step", "gts")})
    if "acc" in parts:  # whether the answer is right, which the scorer `environment` knows under this name
        parts["correct"] = parts.pop("acc")
    return _texts(row, "input", "output") | {"reward": row.get("score"), "parts": parts, "golds": _golds(row, "gts")}


def _trl(row: Row) -> Fields:
    """Read a row of `completions_*.parquet`. A reward function that did not apply gave NaN; weights are not known."""
    parts = _numbers({name: value for name, value in row.items() if isinstance(value, float) and name != "advantage"})
    return _texts(row, "prompt", "completion") | {"reward": sum(parts.values()) if parts else None, "parts": parts}


FORMATS = {"messages": _messages, "openai-finetune": _messages, "verifiers": _verifiers, "verl": _verl, "trl": _trl}


def read_row(row: Row | RowError, form: str, where: str) -> Rollout:
    """Read a row. Raises RowError: it is not as the format says."""
    if isinstance(row, RowError):
        raise row
    try:
        step = {"step": row["step"]} if row.get("step") is not None else {}
        rollout = Rollout.model_validate(FORMATS[form](row) | step | {"row": where})
        rollout.model_dump_json()  # an error, if a text has half a surrogate pair, which UTF-8 cannot store
        orjson.dumps([rollout.parts, rollout.tools])  # also in the names of parts, and numbers that need over 64 bits
        return rollout
    except ValidationError as error:
        raise RowError(explain(error.errors()[0])) from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RowError(f"it is not as {form} writes it: {error}") from None


def _texts(row: Row, prompt: str, completion: str) -> Fields:
    """Return the messages of a row with one text before the policy's first token, and one after it."""
    asked, answer = row.get(prompt), row.get(completion)
    if not isinstance(asked, str) or not isinstance(answer, str):
        raise RowError(f"columns {prompt!r} and {completion!r} are not both text")
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "rendered": True}


def _numbers(values: Row) -> dict[str, float]:
    """Return the values that are numbers; NaN is a missing one."""
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def _golds(row: Row, column: str) -> list[str]:
    """Return the gold answers; none if they are absent, placeholders, or no text."""
    try:
        return solutions(row, column)
    except RowError:
        return []


def problem_of(rollout: Rollout) -> Problem:
    """Return the problem of an episode. Its id has digits of its key: rows may give one id to several problems.

    Raises:
        RowError: its metadata cannot be written as JSON.
    """
    chat = [{"role": each.role, "content": each.text} for each in rollout.prompt]
    asked = "\n\n".join(each["content"] for each in chat if each["role"] != "system")
    others = {name: value for name, value in rollout.metadata.items() if name != MESSAGES}
    metadata = as_json(others | ({MESSAGES: chat} if len(chat) > 1 else {}))
    problem = Problem("", asked, rollout.golds, rollout.data_source, metadata)
    return replace(problem, problem_id=f"{rollout.id}~{key(problem)[:12]}".lstrip("~"))


def add_tokens(rollout: Rollout, chat: Chat) -> None:
    """Add the tokens of prompts and answers, unless they are there; show what calls and thoughts were sampled as.

    Those of messages are what a policy would have sampled under this chat template. In an answer the text of a control
    token stays text, as in contents: else one `<|im_end|>` there would teach to end a turn early.

    Raises:
        ValueError: the template does not show the conversation, or does not write its calls.
    """
    turns = rollout.turns
    if not rollout.rendered and not any(turn.token_ids for turn in turns):
        _render(rollout, chat)
    for turn in turns:
        prompt = turn.prompt_token_ids or []
        if rollout.rendered and not turn.token_ids:
            answer = chat.control.encode(chat.control.said_apart(turn.content))
            turn.prompt_token_ids, turn.token_ids = chat.encode(rollout.prompt[0].content), answer
        elif turn.token_ids and (turn.tool_calls or chat.opening_of(prompt)):  # the content is only a part of it
            turn.content, turn.reasoning_content = chat.decode(turn.token_ids, prompt), None


def _render(rollout: Rollout, chat: Chat) -> None:
    """Add the tokens of a conversation in messages, each turn after what was said before it."""
    given = [each.model_dump(exclude={"reasoning_content"}) | {"content": each.text} for each in rollout.messages]
    messages = [ChatMessage.model_validate(each).form for each in given]
    number_calls(messages)
    ids, answer, before = list[int](), list[int](), 0
    chat.prompt(messages[: rollout.places[-1]], rollout.tools)  # the longest one is checked, and with it the others
    for place, turn in zip(rollout.places, rollout.turns, strict=True):
        new = messages[before + 1 : place]
        following = chat.continuation(messages[:before], answer, new, rollout.tools) if before else None
        ids = chat.prompt(messages[:place], rollout.tools) if following is None else [*ids, *following]
        calls = messages[place].get("tool_calls", ())
        if any(read_arguments(call["function"]["arguments"]) is None for call in calls):
            raise ValueError("it has a call whose arguments are no JSON object, which is not to be learnt")
        if not (answer := chat.answer(turn.text, calls, rollout.tools)):
            raise ValueError("the chat template does not write its calls of tools, or no end after them")
        turn.prompt_token_ids, turn.token_ids = ids, answer
        ids, before = [*ids, *answer], place


def to_trajectory(rollout: Rollout, samples: Counter[str], run: str, problem_set: str, form: str) -> Trajectory:
    """Return the record of an episode, with its tokens if they are known; `samples` counts those of each problem.

    The reward is that of the last turn; earlier turns answer nothing. Without reward and gold answer the last one
    answers nothing either, since nobody can grade it. A prompt that does not continue the tokens before it begins a
    sequence.
    """
    problem, status, last = problem_of(rollout), rollout.status or "completed", len(rollout.turns) - 1
    group = f"{run}/{rollout.step:06d}/{problem.problem_id}"
    samples[group] += 1
    ids, mask, logprobs, starts, turns = list[int](), list[bool](), list[Any](), [0], list[Turn]()
    right = rollout.parts.get("correct", rollout.reward)
    verdict = {None: "", 0.0: "wrong", 1.0: "correct"}.get(right, "")
    for number, (turn, reply) in enumerate(zip(rollout.turns, rollout.replies, strict=True)):
        prompt, sampled, known = turn.prompt_token_ids or [], turn.token_ids or [], len(ids) - starts[-1]
        if prompt[:known] != ids[starts[-1] :]:
            starts.append(len(ids))
            known = 0
        ids += prompt[known:] + sampled
        mask += [False] * len(prompt[known:]) + [True] * len(sampled)
        logprobs += [0.0] * len(prompt[known:])
        logprobs += turn.logprobs or [None] * len(sampled)
        columns: dict[str, Any] = {"verdict": "", "reward": 0.0, "finish_reason": "stop" if rollout.status else ""}
        if number == last:
            columns |= {"verdict": verdict, "reward": rollout.reward or 0.0}
            columns |= {"finish_reason": "length"} if status == "truncated" else {}
        feedback = "\n".join(each.text for each in reply)
        text = opened_by(rollout.prompt[0].content) * rollout.rendered + turn.text
        columns |= {"start": len(ids) - len(sampled), "end": len(ids), "text": text, "feedback": feedback}
        turns.append(Turn(**columns, latency_s=0.0, seed=0))
    is_graded = rollout.reward is not None or bool(rollout.golds)
    return Trajectory(
        **asdict(problem),
        trajectory_id=f"{group}/{samples[group] - 1}",
        run=run,
        iteration=rollout.step,
        sample=samples[group] - 1,
        status=status,
        reason=rollout.reason,
        token_ids=ids,
        action_mask=mask,
        logprobs=logprobs,
        versions=[-1] * len(ids),
        turns=turns,
        problem_set=problem_set,
        agent="imported",
        agent_args=json.dumps({"format": form, "row": rollout.row}),
        environment="imported",
        sequence_starts=starts,
        unplayed_turns=0 if status == "completed" else -1,
        calls=list(_calls(rollout)),
        ungraded=list(range(len(turns) - is_graded)),
        reward_parts=[*({} for _ in turns[1:]), rollout.parts] if rollout.parts and turns else [],
        fault="set-up" if status == "failed" else "",
        **_UNKNOWN,
    )


_UNKNOWN: dict[str, Any] = {"policy": "", "policy_version": -1, "seed": 0, "started_at": 0.0, "latency_s": 0.0}
_UNKNOWN |= {"sampling": "{}", "environment_args": "{}", "turn_discount": 1.0}


def _calls(rollout: Rollout) -> Iterator[Call]:
    """Yield the calls of all turns with their outputs: an output answers the call with its id, or the next one."""
    for number, (turn, reply) in enumerate(zip(rollout.turns, rollout.replies, strict=True)):
        outputs = [each for each in reply if each.role == "tool"]
        waiting = defaultdict[str, deque[int]](deque)  # places of outputs, by the id of the call
        for place, output in enumerate(outputs):
            waiting[output.tool_call_id].append(place)
        for call in turn.tool_calls:
            first = min(filter(None, (waiting[""], waiting[call["id"]])), key=lambda places: places[0], default=None)
            answer = outputs[first.popleft()] if first else None
            asked = number, call["id"], call["function"]["name"], call["function"]["arguments"]
            yield Call(*asked, answer.text, "answered") if answer else Call(*asked, "", "unanswered")
