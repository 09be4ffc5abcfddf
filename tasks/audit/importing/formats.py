"""The formats of dumps: for each a function from a row to the fields of a `Rollout`, as the programs write them.

messages         `messages`, or `prompt` and `completion`, and if you like `answer`, `reward` (or a number, or true or
                 false, as `score`, `label` or `thumb`), `id`, `step`, `truncated`, `tools`, `data_source`, `metadata`;
                 an assistant's message may have `prompt_token_ids`, `token_ids` and `logprobs`
openai-finetune  the same: `messages` with `tool_calls` and `weight`, and `tools`
verifiers        `results.jsonl`; with tokens if the state column `trajectory` was saved
verl             what `trainer.rollout_data_dir` and `trainer.validation_data_dir` hold: one text for all turns
trl              the files of `log_completions=True`: one text for all turns, a column for each reward function
"""

import math
from typing import Any

import orjson
from pydantic import ValidationError

from configs.loader import explain
from tasks.audit.importing.rollout import Rollout
from tasks.problems.problem_set import Row, RowError
from tasks.problems.rows import solutions

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
    prompt, said = _asked_and_said(row)
    steps, assistant = row.get("trajectory") or [], [each for each in said if each.get("role") == "assistant"]
    for message, step in zip(assistant, steps, strict=False) if len(steps) == len(assistant) else ():
        tokens = step.get("tokens") or {}
        message["prompt_token_ids"], message["token_ids"] = tokens.get("prompt_ids"), tokens.get("completion_ids")
        message["logprobs"] = tokens.get("completion_logprobs")
    status = "failed" if row.get("error") else "truncated" if row.get("is_truncated") else "completed"
    return {
        "messages": [*prompt, *said],
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
    prompt, said = (
        [{"role": role, "content": row[name]}] if isinstance(row.get(name), str) else row.get(name) or []
        for name, role in (("prompt", "user"), ("completion", "assistant"))
    )
    return [each | {"weight": 0} for each in prompt], said


def _verl(row: Row) -> Fields:
    """Read what `_dump_generations` writes: input, output, gts, score, step, and what the reward function returned."""
    parts = _numbers({name: value for name, value in row.items() if name not in ("score", "reward", "step", "gts")})
    if "acc" in parts:  # whether the answer is right, which the scorer `environment` knows under this name
        parts["correct"] = parts.pop("acc")
    more = {"reward": row.get("score"), "parts": parts, "golds": _golds(row, "gts")}
    return _texts(row, "input", "output") | more


def _trl(row: Row) -> Fields:
    """Read a row of `completions_*.parquet`. A reward function that did not apply gave NaN; weights are not known."""
    parts = _numbers({name: value for name, value in row.items() if isinstance(value, float) and name != "advantage"})
    reward = sum(parts.values()) if parts else None
    return _texts(row, "prompt", "completion") | {"reward": reward, "parts": parts}


FORMATS = {"messages": _messages, "openai-finetune": _messages, "verifiers": _verifiers, "verl": _verl, "trl": _trl}


def read_row(row: Row | RowError, form: str, where: str) -> Rollout:
    """Read a row. Raises RowError: it is not as the format says."""
    if isinstance(row, RowError):
        raise row
    try:
        told = {"step": row["step"]} if row.get("step") is not None else {}
        rollout = Rollout.model_validate(FORMATS[form](row) | told | {"row": where})
        rollout.model_dump_json()  # an error, if a text has half a surrogate pair, which UTF-8 cannot store
        orjson.dumps([rollout.parts, rollout.tools])  # also in the names of parts, and numbers that need over 64 bits
        return rollout
    except ValidationError as error:
        raise RowError(explain(error.errors()[0])) from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RowError(f"it is not as {form} writes it: {error}") from None


def _texts(row: Row, prompt: str, completion: str) -> Fields:
    """Return the messages of a row with one text before the policy's first token, and one after it."""
    asked, said = row.get(prompt), row.get(completion)
    if not isinstance(asked, str) or not isinstance(said, str):
        raise RowError(f"columns {prompt!r} and {completion!r} are not both text")
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
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
