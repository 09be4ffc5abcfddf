"""The formats of dumps: for each a function from a row to the fields of a `Rollout`, as the programs write them.

messages         `messages`, and if you like `answer`, `reward`, `id`, `step`, `truncated`, `tools`, `data_source` and
                 `metadata`; an assistant's message may have `prompt_token_ids`, `token_ids`, `logprobs` and a `reward`
openai-finetune  the same: `messages` with `tool_calls` and `weight`, and `tools`
verifiers        `results.jsonl`; with tokens if the state column `trajectory` was saved
verl             what `trainer.rollout_data_dir` and `trainer.validation_data_dir` hold: one text for all turns
trl              the files of `log_completions=True`: one text for all turns, a column for each reward function
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tasks.audit.importing.rollout import rendered
from tasks.problems.columns import present, solutions
from tasks.problems.problem_set import Row, RowError

_GOLDS = ("answer", "solutions", "solution", "ground_truth", "gts")
"""Columns in which gold answers are looked for, in this order."""
Fields = dict[str, Any]
"""Fields of a `Rollout`, which are still to be validated."""


def _messages(row: Row) -> Fields:
    more = _given(row, "reward", "id", "step", "data_source", "tools")
    if isinstance(cut := row.get("truncated"), bool):
        more |= {"status": "truncated", "reason": "the row says so"} if cut else {"status": "completed"}
    if isinstance(row.get("metadata"), dict):
        more["metadata"] = row["metadata"]
    return {"messages": row.get("messages"), "golds": _golds(row), **more}


def _verifiers(row: Row) -> Fields:
    """Read a `RolloutOutput`: prompt and completion are messages or texts, `metrics` what the reward functions gave."""
    prompt, said = (
        [{"role": role, "content": row[name]}] if isinstance(row.get(name), str) else row.get(name) or []
        for name, role in (("prompt", "user"), ("completion", "assistant"))
    )
    steps, assistant = row.get("trajectory") or [], [each for each in said if each.get("role") == "assistant"]
    for message, step in zip(assistant, steps, strict=False) if len(steps) == len(assistant) else ():
        tokens = step.get("tokens") or {}
        message["prompt_token_ids"], message["token_ids"] = tokens.get("prompt_ids"), tokens.get("completion_ids")
        message["logprobs"] = tokens.get("completion_logprobs")
    error, tools = row.get("error"), row.get("tool_defs") or []
    status = "failed" if error else "truncated" if row.get("is_truncated") else "completed"
    return {
        "messages": [*(each | {"weight": 0} for each in prompt), *said],
        "reward": row.get("reward"),
        "parts": _numbers(row.get("metrics") or {}),
        "golds": _golds(row),
        "id": row.get("example_id", ""),
        "metadata": {"info": row["info"]} if row.get("info") else {},
        "tools": [each if "function" in each else {"type": "function", "function": each} for each in tools],
        "status": status,
        "reason": "" if status == "completed" else str(row.get("error_chain") or row.get("stop_condition"))[:1000],
    }


def _verl(row: Row) -> Fields:
    """Read what `_dump_generations` writes: input, output, gts, score, step, and what the reward function returned."""
    parts = _numbers({name: value for name, value in row.items() if name not in ("score", "reward", "step", *_GOLDS)})
    if "acc" in parts:  # whether the answer is right, which the scorer `environment` knows under this name
        parts["correct"] = parts.pop("acc")
    messages = [*rendered(_text(row, "input")), {"role": "assistant", "content": _text(row, "output")}]
    more = _given(row, "step", "data_source")
    return {"messages": messages, "reward": row.get("score"), "parts": parts, "golds": _golds(row), **more}


def _trl(row: Row) -> Fields:
    """Read a row of `completions_*.parquet`. A reward function that did not apply gave NaN; weights are not known."""
    parts = _numbers({name: value for name, value in row.items() if isinstance(value, float) and name != "advantage"})
    messages = [*rendered(_text(row, "prompt")), {"role": "assistant", "content": _text(row, "completion")}]
    more = _given(row, "step") | ({"reward": sum(parts.values())} if parts else {})
    return {"messages": messages, "parts": parts if len(parts) > 1 else {}, "golds": _golds(row), **more}


FORMATS: Mapping[str, Callable[[Row], Fields]] = {
    "messages": _messages,
    "openai-finetune": _messages,
    "verifiers": _verifiers,
    "verl": _verl,
    "trl": _trl,
}


def _text(row: Row, column: str) -> str:
    """Return a column with a text, which may be blank."""
    if not isinstance(value := present(row, column), str):
        raise RowError(f"column {column!r} is not text: {value!r:.80}")
    return value


def _given(row: Row, *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names if row.get(name) is not None}


def _numbers(values: Row) -> dict[str, float]:
    """Return the values that are numbers; NaN is a missing one."""
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def _golds(row: Row) -> list[str]:
    """Return the gold answers; none if they are placeholders, or no text."""
    found = [name for name in _GOLDS if row.get(name) not in (None, "", [])]
    try:
        return solutions(row, found[0]) if found else []
    except RowError:
        return []
