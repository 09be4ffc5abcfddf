"""Dumps of other programs become data sets that audits and scorers take; what they lack is not checked."""

import argparse
import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from storage import layout
from storage.commands.program import Parser
from storage.logs import catalog
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.records import PROBLEM_SCHEMA, TRAJECTORY_SCHEMA, to_table
from storage.versions import datasets, manifests
from tasks.agents.chat import Chat
from tasks.audit.importing import command
from tasks.audit.importing.rollout import Rollout, _calls, add_tokens, problem_of, read_row, to_trajectory
from tasks.problems.problem_set import BadRow, ProblemError, RowError
from tasks.problems.rows import MESSAGES
from tasks.score.verifier import Verifier
from tests.support.audit_play import FEEDBACK, Play, checks_of, only
from tests.support.chain_helpers import commit_rows
from tests.support.chat_formats import FORMATS, chat_of
from tests.support.problem_files import write_rows
from tests.support.train_helpers import make_scores, make_trajectory

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "3 + 4 and 1 + 1?"}]
ANSWER = {"role": "assistant", "content": "It is 7.\n"}
CALL: dict[str, Any] = {"id": "a", "function": {"name": "add", "arguments": '{"x": 1}'}}
VERL: dict[str, Any] = {"gts": "7", "score": 1.0, "step": 2, "acc": True, "pred": "7"}
VERL |= {"input": "system\nAdd.\nuser\nWhat is 3 + 4?\nassistant\n", "output": "#### 7"}
PROMPT = "<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n"
TRL: dict[str, Any] = {"step": 5, "prompt": PROMPT, "completion": "7", "right": 1.0, "format": 0.5, "length": 3}
TRL |= {"judge": float("nan"), "advantage": 0.7}
ADDS = json.dumps({"id": "a", "name": "add", "arguments": "{}"})
SAID: list[dict[str, Any]] = [{"role": "assistant", "content": "", "tool_calls": [ADDS]}]
SAID += [{"role": "tool", "tool_call_id": "a", "content": "7"}, {"role": "assistant", "content": "It is 7."}]
TOKENS: dict[str, Any] = {"prompt_ids": [5, 6], "completion_ids": [7], "completion_logprobs": [-0.5]}
LONGER: dict[str, Any] = {"prompt_ids": [5, 6, 7, 8], "completion_ids": [9], "completion_logprobs": [-0.1]}
VERIFIERS: dict[str, Any] = {"example_id": 3, "prompt": [{"role": "user", "content": "3 + 4?"}], "completion": SAID}
VERIFIERS |= {"answer": "7"}
VERIFIERS |= {"reward": 1.0, "metrics": {"right": 1.0}, "is_truncated": False, "error": None, "tool_defs": None}
VERIFIERS |= {"trajectory": [{"tokens": TOKENS}, {"tokens": LONGER}]}
TUNING: dict[str, Any] = {"messages": [{"role": "developer", "content": "Add."}, {"role": "user", "content": "3 + 4?"}]}
TUNING["messages"] += [{"role": "assistant", "content": "8", "weight": 0}, {"role": "user", "content": "No."}]
TUNING["messages"] += [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "7"}]
TUNING["messages"] += [{"role": "assistant", "content": [{"type": "text", "text": "7"}]}]
ROWS: dict[str, Any] = {"verl": VERL, "trl": TRL, "verifiers": VERIFIERS, "openai-finetune": TUNING, "messages": TUNING}


def write(path: Path, rows: Sequence[Any]) -> str:
    return str(write_rows(path, *rows))


def imported(store: Store, *words: str, knobs: Sequence[str] = ()) -> dict[str, Any]:
    """Run the command; return what it prints as JSON."""
    command.add_arguments(parser := Parser())
    given = argparse.Namespace(cache=store.path("cache"))
    return dict(command.run(store, parser.parse_args([*words, "score.workers=1", *knobs], given)).data)


def rows_of(store: Store, version: str) -> list[Any]:
    return list(datasets.trajectories(store, version, Path(store.path("cache"))))


def test_each_format_is_read_as_its_program_means_it() -> None:
    """Prompts without the template's marks, rewards with their parts, gold answers, steps, calls; what a turn is."""
    read = {name: read_row(row, name, "") for name, row in ROWS.items()}
    verl = read["verl"]
    assert (verl.prompt[0].text, verl.rendered) == (VERL["input"], True)
    assert (verl.reward, verl.parts, verl.golds, verl.step) == (1, {"correct": 1}, ["7"], 2)
    assert [each.text for each in read["trl"].messages] == [TRL["prompt"], "7"]
    assert (read["trl"].reward, read["trl"].parts) == (1.5, {"right": 1.0, "format": 0.5})
    assert (read["verifiers"].id, read["verifiers"].places, read["verifiers"].status) == ("3", [1, 3], "completed")
    assert read["verifiers"].messages[3].logprobs == [-0.1]
    tuned = read["openai-finetune"]
    assert ([each.role for each in tuned.prompt], tuned.places) == (["system", "user", "assistant", "user"], [4, 6])
    row = {"messages": [*ASKED, ANSWER], "metadata": {MESSAGES: 5, "level": 2}}  # which problems call their messages
    assert json.loads(problem_of(read_row(row, "messages", "")).metadata) == {"level": 2}
    (call,) = tuned.messages[4].tool_calls
    assert (call["function"]["arguments"], tuned.reward, tuned.status) == ('{"x": 1}', None, None)


NAMES = ["role", "content", "text", "function", "name", "arguments", "parameters", "id", "\ud800"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters() | st.just("\ud800"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=6,
)


@given(form=st.sampled_from(sorted(ROWS)), value=JSON, data=st.data())
def test_a_wrong_value_makes_a_bad_row_at_most(form: str, value: object, data: st.DataObject) -> None:
    """Whatever a program writes into a column, or into a message, ends neither the import nor in the store unread."""
    row = json.loads(json.dumps(ROWS[form]))
    messages = [part for part in row.values() if isinstance(part, list)]
    places = [row, *(each for part in messages for each in part if isinstance(each, dict))]
    place = data.draw(st.sampled_from(places))
    names = [*sorted(place), "tools", "tool_calls", "function_call", "metadata", "\ud800"]
    place[data.draw(st.sampled_from(names))] = value
    try:
        rollout = read_row(row, form, "")
        problem = problem_of(rollout)
    except RowError:
        return
    assert rollout.turns or rollout.status == "failed"
    with contextlib.suppress(ValueError):  # such as calls that this template does not write
        add_tokens(rollout, chat_of("qwen3"))
    to_table([problem], PROBLEM_SCHEMA)
    to_table([to_trajectory(rollout, Counter(), "r", "p", form)], TRAJECTORY_SCHEMA)


def sampled(**values: Any) -> dict[str, Any]:
    """Return a row of messages with the tokens of its answer."""
    tokens = {"prompt_token_ids": [5], "token_ids": [9], "logprobs": [-0.5], **values}
    return {"messages": [*ASKED, ANSWER | tokens]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [], "tools": [{"type": "function"}]}, "a tool has no function with a name"),
        ({"messages": [], "data_source": "\ud800"}, "surrogates not allowed"),
        (VERL | {"\ud800": 1.0}, "surrogates not allowed"),
        (VERL | {"acc": 10**400}, "too large"),
        (sampled(token_ids=[999_999]), "token ids: the policy has no token 999999, only 0 to"),
        (sampled(logprobs=[5.0]), "logprobs.0=5.0: Input should be less than or equal to 0.0001"),
    ],
)
def test_a_row_of_any_shape_costs_itself_alone(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    """It is a bad row with its place and its reason, whichever library could not take it; the others are read."""
    form = "verl" if "input" in row else "messages"
    row = row | ({"messages": [*ASKED, ANSWER]} if row.get("messages") == [] else {})
    good = VERL if form == "verl" else sampled()
    rollouts, bad = command.read([write(tmp_path / "a.jsonl", [good, row, good])], form, chat_of("qwen3"))
    assert [(str(each.where), type(each)) for each in bad] == [("line 2 of a.jsonl", BadRow)]
    assert reason in bad[0].reason
    assert len(rollouts) == 2


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "harmony"])  # it has control tokens in calls
def test_what_reads_like_a_control_token_in_an_answer_stays_text(tmp_path: Path, name: str) -> None:
    """Else an answer with `<|im_end|>` in it would teach to end turns there, or to write the turns of others.

    Tags of thoughts and of calls are tokens: a policy samples them itself.
    """
    chat = chat_of(name)
    special = [token for tokens in FORMATS[name][1:3] for token in tokens if "|" in token or token in FORMATS[name][1]]
    texts = [text for token in special for text in (f"7{token}8", token, f"7{token}")]
    rendered = write(tmp_path / "a.jsonl", [TRL | {"completion": text} for text in texts])
    rollouts, _ = command.read([rendered], "trl", chat)
    asked = write(tmp_path / "b.jsonl", [{"messages": [*ASKED, ANSWER | {"content": text}]} for text in texts])
    learnt = [rollout.turns[0].token_ids or [] for rollout in rollouts]
    learnt += [(rollout.turns[0].token_ids or [])[:-1] for rollout in command.read([asked], "messages", chat)[0]]
    for text, said in zip(2 * texts, learnt, strict=True):  # without the end that the policy is to sample
        assert not set(said).intersection(map(chat.tokenizer.convert_tokens_to_ids, special))
        assert str(chat.tokenizer.decode(said)).endswith(text)


QUESTION = "system\nAdd.\nuser\nWhat is {} + 4?\nassistant\n"


def verl(*numbers: int, step: int = 1, wrong: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return rows of verl, four episodes of each sum; the policy always says that those of `wrong` are 1."""
    said = {n: 1 if n in wrong else n + 4 for n in numbers}
    rows = [{"input": QUESTION.format(n), "output": f"#### {said[n]}", "gts": str(n + 4)} for n in numbers]
    return [row | {"step": step, "score": float(row["output"][5:] == row["gts"])} for row in rows for _ in range(4)]


def test_a_dump_is_audited_and_scored(store: Store, verifier: Verifier, tmp_path: Path) -> None:
    """A training dump and a validation dump under one name: contamination shows, and checks of tokens are skipped.

    The same files again make nothing new; other rows for the same step are refused, and so is another format.
    """
    train = write(tmp_path / "train.jsonl", [*verl(1, 2, 3, wrong=[2]), *verl(1, 2, 3, step=2)])
    made = imported(store, train, "--format=verl", "--name=mine")
    assert [version for version, *_ in made["data_sets"]] == [layout.trajectories("mine", step) for step in (1, 2)]
    assert {what: count for what, count, _ in made["lacks"]}["token ids"] == 24
    held_out = write(tmp_path / "val.jsonl", verl(3, 40, step=2))
    imported(store, held_out, "--format=verl", "--name=mine", "--evaluation=held-out")
    checks = checks_of(store, verifier, "mine")
    assert {name for name, check in checks.items() if check.verdict == "fail"} == {"contamination"}
    assert checks["contamination"].cases == 1
    of_tokens = ("mask_and_spans", "bad_logprobs", "staleness", "repeated_seeds", "broken_prefix")
    for name in (*of_tokens, "truncated", "loops"):
        assert checks[name].verdict == "skipped", name
    assert "the data sets lack policy versions" in checks["staleness"].says
    entries = catalog.read_all(store)
    again = imported(store, train, "--format=verl", "--name=mine")["data_sets"]
    assert again == [(*names, "already there") for *names, _ in made["data_sets"]]
    assert len(catalog.read_all(store)) == len(entries)
    committed = [entry.version for entry in entries if manifests.committed(store, entry.version)]
    assert verify(store, committed, deep=True).findings == []
    with pytest.raises(ValueError, match="trajectories/000001 exists and has other rows"):
        imported(store, write(tmp_path / "more.jsonl", verl(9)), "--format=verl", "--name=mine")
    with pytest.raises(ValueError, match="the run mine exists and holds something else"):
        imported(store, write(tmp_path / "other.jsonl", [TUNING]), "--format=messages", "--name=mine")


def test_what_other_programs_lack_hides_no_fault_of_others(store: Store, verifier: Verifier, tmp_path: Path) -> None:
    """In an audit of all runs a data set without tokens is left out of their checks, and only that one."""
    row = make_trajectory("t0", [[7, 8], [9]])
    faulty = replace(row, action_mask=[not masked for masked in row.action_mask])
    version = layout.trajectories("r", 0)
    commit_rows(store, version, "trajectories", [faulty], [])
    commit_rows(store, layout.scores("r", 0, "5c0e"), "scores", make_scores("t0", 0.0, 1.0), [version])
    imported(store, write(tmp_path / "a.jsonl", [VERL]), "--format=verl", "--name=mine")
    nothing = {"messages": [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": "Hi."}]}
    made = imported(store, write(tmp_path / "b.jsonl", [nothing, nothing]), "--format=messages", "--name=silent")
    assert "zero_variance" in {what: checks for what, _, checks in made["lacks"]}["graded turns"]
    checks = checks_of(store, verifier, settings=only("mask_and_spans", "zero_variance"))
    masks, variance = checks["mask_and_spans"], checks["zero_variance"]
    assert (masks.of, masks.verdict, [case.id for case in masks.examples]) == (1, "fail", ["t0"])
    assert masks.says.endswith("left out: 2 data sets without token ids, such as runs/mine/trajectories/000002")
    assert (variance.verdict, variance.of) == ("pass", 0)
    assert variance.says.endswith("data set without graded turns, such as runs/silent/trajectories/000000")


def test_tokens_are_kept_or_made(store: Store, verifier: Verifier, play: Play, tmp_path: Path) -> None:
    """A rendered prompt and its answer become tokens; stored ids and logprobs stay, and another text shows."""
    folder, asked = tmp_path / "tokenizer", "What is 12 + 7?"
    play.tokenizer.save_pretrained(folder)
    chat = Chat(play.tokenizer)
    prompt = chat.prompt([{"role": "user", "content": asked}])
    ids = chat.encode("19<|im_end|>")
    stored = {"prompt_token_ids": prompt, "token_ids": ids, "logprobs": [-0.5] * len(ids)}
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": "19"}]
    again = [{"role": "user", "content": FEEDBACK}, {"role": "assistant", "content": "19"}]
    options = ("--format=messages", f"--tokenizer={folder}")
    whole = str(play.tokenizer.decode(prompt))
    rendered = write(tmp_path / "a.jsonl", [{"input": whole, "output": "19", "gts": "19"}])
    imported(store, rendered, "--format=verl", f"--tokenizer={folder}", "--name=made")
    (row,) = rows_of(store, layout.trajectories("made", 0))
    assert (row.token_ids, row.sequence_starts, set(row.logprobs)) == (prompt + ids[:-1], [0], {0.0, None})
    of_tokens = ("mask_and_spans", "broken_prefix", "text_differs", "template_drift", "bad_logprobs")
    checks = checks_of(store, verifier, "made", settings=only(*of_tokens))
    assert checks.pop("bad_logprobs").verdict == "skipped"
    assert {(check.verdict, check.of > 0) for check in checks.values()} == {("pass", True)}, checks

    kept = [{"messages": [said[0], said[1] | stored | {"content": text}], "reward": 1} for text in ("19", "12")]
    more = chat.prompt([*said, again[0]])
    kept[0]["messages"] += [again[0], again[1] | stored | {"prompt_token_ids": more}]  # type: ignore[operator]
    imported(store, write(tmp_path / "b.jsonl", kept), *options, "--name=kept")
    row, _ = rows_of(store, layout.trajectories("kept", 0))
    assert (row.token_ids, row.sequence_starts, row.ungraded) == (more + ids, [0], [0])
    assert [row.logprobs[turn.start : turn.end] for turn in row.turns] == [[-0.5] * len(ids)] * 2
    checks = checks_of(store, verifier, "kept", settings=only(*of_tokens))
    assert (checks["text_differs"].cases, checks["bad_logprobs"].verdict) == (1, "pass")


ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL | {"id": "b"}]}
OLD: list[dict[str, Any]] = [{"role": "assistant", "function_call": CALL["function"], "tool_calls": None}]
OLD += [{"role": "function", "name": "add", "content": "seven"}]
OUTPUTS = [{"role": "tool", "tool_call_id": number, "content": "seven"} for number in ("b", "a")]
LOG: dict[str, Any] = {"messages": [*ASKED, CALLS, *OUTPUTS, ANSWER], "tools": [ADD], "reward": 1}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
GLM = '\n<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
SPOKEN = {
    "qwen3": (f"{HERMES}\n{HERMES}<|im_end|>", "<|im_end|>"),
    "llama": ('{"name": "add", "parameters": {"x": 1}}' * 2 + "<|eom_id|>", "<|eot_id|>"),
    "glm": (f"{GLM * 2}<|observation|>", "<|user|>"),
    # They refuse two calls, write no calls, and have no end behind calls that the template tells.
    **dict.fromkeys(("single", "opening", "harmony"), ("", "")),
}


@pytest.mark.parametrize("name", SPOKEN)
def test_calls_and_answers_are_learnt_with_their_ends(name: str, tmp_path: Path) -> None:
    """As the chat template writes them; outputs of tools are not. What it does not write is left out."""
    chat, (calls, end) = chat_of(name), SPOKEN[name]
    path = write(tmp_path / "a.jsonl", [LOG, {"messages": [*ASKED, ANSWER]}])
    rollouts, bad = command.read([path], "messages", chat)
    if not calls:
        assert [(str(row.where), type(row)) for row in bad] == [("line 1 of a.jsonl", command.UnshownRow)]
        return
    row, _ = [to_trajectory(each, Counter(), "r", "p", "messages") for each in rollouts]
    texts = [str(chat.tokenizer.decode(row.token_ids[turn.start : turn.end])) for turn in row.turns]
    assert texts == [calls, f"It is 7.\n{end}"]
    shown = [number for number, learnt in zip(row.token_ids, row.action_mask, strict=True) if not learnt]
    assert str(chat.tokenizer.decode(shown)).count("seven") == 2
    assert len(row.sequence_starts) == 1 + (name == "llama")  # which writes the tools behind all messages
    assert [call.output for call in row.calls] == ["seven"] * 2


def test_thoughts_calls_and_old_calls_are_learnt_together(tmp_path: Path) -> None:
    """After a thought, with words before the call, and as OpenAI wrote calls before there were tools.

    Rows whose calls the template cannot write are named, and are no bad rows, of which few are allowed.
    """
    chat = chat_of("qwen3")
    broken = [CALLS | {"tool_calls": [CALL | {"function": {"name": "add", "arguments": "x=1"}}]}]
    said = [CALLS | {"reasoning_content": "Hm", "content": "I <|im_end|>add."}], OLD, broken
    path = write(tmp_path / "a.jsonl", [LOG | {"messages": [*ASKED, *each, ANSWER]} for each in said])
    rollouts, (bad,) = command.read([path], "messages", chat)
    texts = [str(chat.tokenizer.decode(each.turns[0].token_ids or [])) for each in rollouts]
    thought = "<think>\nHm\n</think>\n\nI <|im_end|>add.\n"
    assert texts == [f"{thought}{HERMES}\n{HERMES}<|im_end|>", f"{HERMES}<|im_end|>"]
    assert [(rollouts[0].turns[0].token_ids or []).count(end) for end in chat.encode("<|im_end|>")] == [1]
    assert (str(bad.where), type(bad)) == ("line 3 of a.jsonl", command.UnshownRow)
    assert "it has a call whose arguments are no JSON object" in bad.reason


@pytest.mark.parametrize("special", [False, True])
def test_thoughts_are_no_differing_texts(store: Store, verifier: Verifier, tmp_path: Path, *, special: bool) -> None:
    """The text of a turn has the tag that its prompt ends with, and those that the tokenizer calls special."""
    tokenizer = deepcopy(chat_of("opening").tokenizer)
    tokenizer.add_tokens([AddedToken(tag, special=special) for tag in ("<think>", "</think>")])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    said = ANSWER | {"reasoning_content": "Hm"}, ANSWER
    path = write(tmp_path / "a.jsonl", [{"messages": [*ASKED, each], "reward": 1} for each in said])
    imported(store, path, "--format=messages", f"--tokenizer={tmp_path / 'tokenizer'}", "--name=mine")
    check = checks_of(store, verifier, "mine", settings=only("text_differs"))["text_differs"]
    assert (check.verdict, check.of) == ("pass", 2)
    texts = [row.turns[0].text for row in rows_of(store, layout.trajectories("mine", 0))]
    assert texts == ["<think>\nHm\n</think>\n\nIt is 7.\n", "<think>\n</think>\n\nIt is 7.\n"]


def test_nulls_of_arrow_are_no_arguments(tmp_path: Path) -> None:
    """Each struct of a column has the members of all others. Nulls in arguments that are JSON stay."""
    arguments: list[Any] = [{"x": 1, "at": {"y": 2}}, {"z": [{"a": 1}, {"b": 2}]}, '{"n": null}']
    other = {"type": "function", "function": {"name": "b", "extra": "c"}}
    chat, learnt = chat_of("qwen3"), list[Any]()
    for number, made in enumerate([arguments[:2], arguments[2:], [None]]):
        said = [{"id": "", "function": {"name": "add", "arguments": each}} for each in made]
        rows = [{"messages": [*ASKED, {"role": "assistant", "tool_calls": said}], "tools": [ADD], "reward": True}]
        rows += [{"messages": [*ASKED, ANSWER], "tools": [other]}]
        (rollout, _), bad = command.read([write(tmp_path / f"{number}.parquet", rows)], "messages", chat)
        assert (bad, rollout.tools) == ([], [ADD])
        text = str(chat.tokenizer.decode(rollout.turns[0].token_ids or []))
        learnt += [json.loads(part.partition("</tool_call>")[0])["arguments"] for part in text.split("<tool_call>")[1:]]
    assert learnt == [*arguments[:2], {"n": None}, {}]


@pytest.mark.parametrize(("given", "reward"), [({"label": False}, 0.0), ({"score": 3.5}, 3.5)])
def test_thumbs_without_a_pair_are_rewards(given: dict[str, Any], reward: float) -> None:
    """A conversation with an opinion and no partner; prompt and completion may be texts, or messages."""
    lists, texts = {"prompt": ASKED, "completion": [ANSWER]}, {"prompt": "3 + 4?", "completion": "7"}
    for row in (lists, texts, {"messages": [*ASKED, ANSWER]}):
        rollout = read_row(row | given, "messages", "")
        turn = to_trajectory(rollout, Counter(), "r", "p", "messages").turns[-1]
        verdict = "" if reward else "wrong"
        assert (rollout.reward, len(rollout.turns), turn.reward, turn.verdict) == (reward, 1, reward, verdict)


def test_bad_rows_are_named_with_their_lines(store: Store, tmp_path: Path) -> None:
    """Broken JSON, a NaN for a reward, wrong types and rows without an answer are left out; too many are refused."""
    bad = ["{", VERL | {"score": float("nan")}, VERL | {"output": None}, VERL | {"step": -1}]
    path = write(tmp_path / "a.jsonl", [VERL, *bad])
    options = (path, "--format=verl", "--name=mine")
    with pytest.raises(ProblemError, match=r"4 of 5 rows are bad.*max_bad_share.*\n +line 2 of a.jsonl: not JSON"):
        imported(store, *options)
    said = " ".join(imported(store, *options, knobs=["problems.max_bad_share=0.9"])["says"])
    assert "line 3 of a.jsonl: reward=nan: Input should be a finite number" in said
    (tmp_path / "not.parquet").write_text("PAR1")
    with pytest.raises(ProblemError, match=r"not.parquet cannot be read"):
        imported(store, str(tmp_path / "not.parquet"), "--format=trl", "--name=none")


def test_steps_and_models_of_different_files_are_kept_apart(tmp_path: Path) -> None:
    """The name of a file tells the step of rows that do not; files with the same problems are no parts of one step.

    Groups of four stay such; parts of one step, with problems of their own each, become one data set.
    """

    def written(file: str, *sums: int) -> str:
        asked = [[{"role": "user", "content": f"{n} + 4?"}, {"role": "assistant", "content": "7"}] for n in sums]
        return write(tmp_path / file, [{"messages": each} for each in asked for _ in range(4)])

    def sizes(*files: str) -> dict[int, list[int]]:
        """Return the sizes of the groups of each step."""
        rollouts, _ = command.read(files, "messages", None)
        command._keep_apart(rollouts)
        groups = Counter((each.step, problem_of(each).problem_id) for each in rollouts)
        return {step: [size for (other, _), size in groups.items() if other == step] for step, _ in groups}

    steps = [written(f"run/{folder}/rows.jsonl", 1, 2) for folder in ("step_2", "global_step_10")]
    assert sizes(f"{tmp_path}/run/*step_*/rows.jsonl") == sizes(*steps) == {2: [4, 4], 10: [4, 4]}
    assert sizes(steps[0], steps[0]) == sizes(steps[0]) == {0: [4, 4]}
    assert sizes(*(written(f"writer{n}.jsonl", n) for n in (1, 2, 3))) == {0: [4, 4, 4]}
    with pytest.raises(ValueError, match=r"jsonl and .*jsonl have the same problems at step 0.* --name"):
        sizes(*(written(f"{name}.jsonl", 1, 2) for name in ("qwen-0.6b", "qwen-1.7b")))


def test_parquet_of_trl_has_rewards_but_no_gold_answers(store: Store, verifier: Verifier, tmp_path: Path) -> None:
    """Without gold answers the program's own rewards are the scores, and checks of gold answers are skipped."""
    path = write(tmp_path / "completions_00005.parquet", [TRL, TRL | {"right": 0.0}])
    elsewhere, options = Store(str(tmp_path / "elsewhere")), (f"storage.root={store.root}", "--format=trl")
    ((version, scores, _),) = imported(elsewhere, *options, "--name=mine", path)["data_sets"]
    assert version == layout.trajectories("mine", 5)
    graded = list(datasets.rows(store, scores, tmp_path))
    assert [(each["verdict"], each["reward"]) for each in graded] == [("correct", 1.5), ("correct", 0.5)]
    checks = checks_of(store, verifier, "mine", settings=only("unmatched_gold", "unscored_turns"))
    assert (checks["unmatched_gold"].verdict, checks["unscored_turns"].verdict) == ("skipped", "pass")


def test_calls_are_matched_with_their_outputs_in_any_order() -> None:
    """Outputs without an id answer the next call."""
    calls = [{"id": f"c{n}", "function": {"name": "f", "arguments": "{}"}} for n in range(9)]
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    for ids in ([f"c{number}" for number in range(9)][::-1], [""] * 9):
        said = [{"role": "tool", "content": f"{place}", "tool_call_id": name} for place, name in enumerate(ids)]
        outputs = [int(each.output) for each in _calls(Rollout.model_validate({"messages": [*asked, *said]}))]
        assert outputs == (list(range(9)) if ids[0] == "" else list(range(9))[::-1])
