"""The formats of dumps: for each a function from a row to a `Rollout`, after the source of the program that writes it.

messages         `messages`, and if you like `answer` (or `solutions`), `reward`, `id`, `step`, `truncated`, `tools`,
                 `data_source` and `metadata`; a message of the assistant may have `prompt_token_ids`, `token_ids` and
                 `logprobs`, as vLLM names them, and a `reward` of its own
openai-finetune  the same: `messages` with `tool_calls` and `weight`, and `tools`
verifiers        `results.jsonl`; tokens if the state column `trajectory` was saved
verl             what `trainer.rollout_data_dir` and `trainer.validation_data_dir` get: one text for all turns
trl              the files of `log_completions=True`: one text for all turns, a column for each reward function
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from storage.records import Status
from tasks.audit.importing import rollout
from tasks.audit.importing.rollout import Message, Rollout, clean, number, numbers, read_messages, read_rendered
from tasks.problems.columns import as_text, present, solutions
from tasks.problems.problem_set import Row, RowError

_GOLDS = ("answer", "solutions", "solution", "ground_truth", "gts")
"""Columns in which gold answers are looked for, in this order."""
_TRL = ("step", "advantage", *_GOLDS)

Read = Callable[[Row, Sequence[str]], Rollout]
"""Reads a row. The columns are those of rewards, where a format does not name them; empty: all of float numbers."""


def _messages(row: Row, _: Sequence[str]) -> Rollout:
    cut, metadata = row.get("truncated"), row.get("metadata")
    if cut is not None and not isinstance(cut, bool):
        raise RowError(f"column 'truncated' is neither true nor false: {cut!r:.80}")
    return Rollout(
        messages=read_messages(present(row, "messages"), "messages"),
        reward=number(row, "reward"),
        golds=_golds(row),
        problem_id=_optional(row, "id"),
        step=rollout.step(row),
        source=_optional(row, "data_source"),
        metadata=metadata if isinstance(metadata, dict) else {},
        tools=_tools(row.get("tools")),
        status=None if cut is None else "truncated" if cut else "completed",
        reason="the row says that it was truncated" if cut else "",
    )


def _verifiers(row: Row, _: Sequence[str]) -> Rollout:
    """Read `RolloutOutput`: prompt and completion are messages, `metrics` the values of the reward functions."""
    error, metrics, info = row.get("error"), row.get("metrics"), row.get("info")
    prompt = read_messages(present(row, "prompt"), "prompt", sampled=False)
    said = read_messages(row.get("completion") or [], "completion")
    status: Status = "failed" if error else "truncated" if row.get("is_truncated") else "completed"
    reason = str(row.get("error_chain") or error) if error else str(row.get("stop_condition") or "it was truncated")
    return Rollout(
        messages=[*prompt, *_with_tokens(said, row.get("trajectory"))],
        reward=number(row, "reward"),
        parts=numbers(metrics, list(metrics)) if isinstance(metrics, dict) else {},
        golds=_golds(row),
        problem_id=_optional(row, "example_id"),
        metadata={"info": info} if isinstance(info, dict) else {},
        tools=_tools(row.get("tool_defs")),
        status=status,
        reason="" if status == "completed" else clean(reason, "error")[:1000],
    )


def _with_tokens(said: list[Message], steps: Any) -> list[Message]:
    """Add the tokens of the steps of `trajectory`, of which each completion has one."""
    turns = [number for number, message in enumerate(said) if message.sampled]
    if not isinstance(steps, list) or len(steps) != len(turns):
        return said
    found = list(said)
    for number_, each in zip(turns, steps, strict=True):
        tokens = each.get("tokens") if isinstance(each, dict) else None
        if isinstance(tokens, dict):
            read = rollout.read_tokens(tokens, "prompt_ids", "completion_ids", "completion_logprobs")
            found[number_] = replace(found[number_], tokens=read)
    return found


def _verl(row: Row, _: Sequence[str]) -> Rollout:
    """Read what `_dump_generations` writes: input, output, gts, score, step, and what the reward function returned."""
    parts = numbers(row, [name for name in row if name not in ("score", "reward", "step", *_GOLDS)])
    if "acc" in parts:  # whether the answer is right; our scorer `environment` knows it under this name
        parts["correct"] = parts.pop("acc")
    return Rollout(
        messages=[*read_rendered(row, "input"), Message("assistant", clean(present(row, "output"), "output"), True)],
        reward=number(row, "score"),
        parts=parts,
        golds=_golds(row),
        step=rollout.step(row),
        source=_optional(row, "data_source"),
    )


def _trl(row: Row, rewards: Sequence[str]) -> Rollout:
    """Read a row of `completions_*.parquet`. A reward function that did not apply has NaN; weights are not known."""
    columns = rewards or [name for name, value in row.items() if isinstance(value, float) and name not in _TRL]
    if absent := [name for name in rewards if name not in row]:
        raise RowError(f"no column {absent[0]!r}, which --reward names; there are {', '.join(row)}")
    parts = numbers(row, columns)
    said = Message("assistant", clean(present(row, "completion"), "completion"), True)
    return Rollout(
        messages=[*read_rendered(row, "prompt"), said],
        reward=sum(parts.values()) if parts else None,
        parts=parts if len(parts) > 1 else {},
        golds=_golds(row),
        step=rollout.step(row),
    )


FORMATS: Mapping[str, Read] = {
    "messages": _messages,
    "openai-finetune": _messages,
    "verifiers": _verifiers,
    "verl": _verl,
    "trl": _trl,
}


def _optional(row: Row, column: str) -> str:
    """Return a column as text; empty without it."""
    return "" if row.get(column) is None else as_text(row[column], column)


def _golds(row: Row) -> list[str]:
    """Return the gold answers; none if there are only placeholders, or something that is no text."""
    for column in _GOLDS:
        if row.get(column) not in (None, "", []):
            try:
                return solutions(row, column)
            except RowError:
                return []
    return []


def _tools(value: Any) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form; verifiers writes them without the layer `function`."""
    tools = value if isinstance(value, list) else []
    return [
        each if "function" in each else {"type": "function", "function": each}
        for each in tools
        if isinstance(each, dict)
    ]
