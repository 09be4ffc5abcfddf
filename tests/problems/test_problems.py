"""Problem sources: splits stay apart, bad rows do not pass, and no row is dropped silently."""

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.problems import ArithmeticSource, FileSource, HubSource
from configs.score import Score
from storage.records import Problem
from tasks.problems import BadRow, ProblemError, ProblemSet, load_problems
from tasks.problems.generated import split_of
from tasks.problems.problem_set import Where
from tasks.problems.rows import MAPPINGS, PRESETS
from tasks.problems.sources import UseOfSolutions
from tasks.score.scorers import use_of_solutions
from tests.support.problem_files import NAMED, load_file, write_rows


def load_rows(tmp_path: Path, rows: Sequence[Any], max_bad_share: float = 0.99, **knobs: Any) -> ProblemSet:
    return load_file(write_rows(tmp_path / "rows.jsonl", *rows), max_bad_share, **knobs)


GOOD = {"key": "good", "ask": "What is 2 + 3?", "gold": "5"}


# Arithmetic


def arithmetic(**knobs: Any) -> list[Problem]:
    return load_problems(ArithmeticSource(kind="arithmetic", **knobs), 0.0).problems


RANGES = st.tuples(st.integers(-30, 30), st.integers(5, 12), st.integers())


@given(RANGES, RANGES)
def test_splits_never_share_a_problem(train: tuple[int, int, int], held_out: tuple[int, int, int]) -> None:
    """Evaluation problems are never training problems, whatever ranges and seeds the two sources have."""
    found = [
        {each.prompt for each in arithmetic(split=split, low=low, high=low + width, operators=[*"+-*"], seed=seed)}
        for split, (low, width, seed) in (("train", train), ("held-out", held_out))
    ]
    assert all(found)
    assert found[0].isdisjoint(found[1])


def test_split_is_pinned() -> None:
    """Another hash would leak the held-out problems of older runs into training."""
    assert {split_of("What is 12 + 7?"), split_of("What is 3 - 4?")} == {"train"}
    assert split_of("What is 0 + 2?") == "held-out"


def test_seed_orders_and_count_cuts() -> None:
    """The same seed gives the same order, another seed another order; `count` takes the first ones."""
    problems = arithmetic(seed=3)
    assert arithmetic(seed=3) == problems
    assert arithmetic(seed=3, count=10) == problems[:10]
    assert arithmetic(seed=4) != problems
    assert {p.prompt for p in arithmetic(seed=4)} == {p.prompt for p in problems}
    assert arithmetic(operators=["+", "+"]) == arithmetic(operators=["+"])


def test_too_few_problems_is_an_error() -> None:
    """A smaller set than asked for would make evaluations incomparable."""
    with pytest.raises(ProblemError, match=r"^\d+ train problems .* count=900: lower count or widen"):
        arithmetic(count=900)
    with pytest.raises(ProblemError, match=r"^0 train problems"):
        arithmetic(low=2, high=2, operators=["+"])  # the only pair is held out


# Presets


def test_math_keeps_latex_id_subject_and_level(tmp_path: Path) -> None:
    """LaTeX stays unchanged; fields that the data set lacks are left out."""
    about = {"subject": "Algebra", "level": 2, "unique_id": "a/7", "solution": "long"}
    rows = [{"problem": "P", "answer": r"\frac{1}{2}", **about}, {"problem": "Q", "answer": 7}]
    first, second = load_rows(tmp_path, rows, preset="math").problems
    assert first == Problem("a/7", "P", [r"\frac{1}{2}"], "math", '{"level": 2, "subject": "Algebra"}')
    assert second == Problem("000002", "Q", ["7"], "math", "{}")


def test_areal_rows(tmp_path: Path) -> None:
    """AReaL's math rows are read as they are; rows of other kinds are dropped."""
    row = {"query_id": "q1", "prompt": "P", "task": "math", "solutions": [r"\boxed{1}", "1"]}
    other = row | {"query_id": "q2", "task": "proof"}
    text = row | {"query_id": "q3", "solutions": "1"}
    result = load_rows(tmp_path, [row, other, text], preset="areal")
    assert result.problems == [Problem("q1", "P", [r"\boxed{1}", "1"], "areal")]
    assert result.bad == [
        BadRow(Where(2), "column 'task' is 'proof': only 'math' and 'code' can be graded"),
        BadRow(Where(3), "column 'solutions' is not a list: '1'"),
    ]


def test_placeholders_are_no_solutions(tmp_path: Path) -> None:
    """Rows without an answer are dropped and named, but are no bad rows: NuminaMath has thousands of them."""
    rows = [{"q": f"{n}?", "a": a} for n, a in enumerate(["1", "proof", "notfound", "B", "proof"])]
    result = load_rows(tmp_path, rows, max_bad_share=0.0, fields={"prompt": "q", "solutions": "a"})
    assert [problem.solutions for problem in result.problems] == [["1"], ["B"]]
    assert (result.bad, [row.where.line for row in result.left_out]) == ([], [2, 3, 5])
    assert result.left_out[0].reason == "no answer can be right: the solution is a placeholder, 'proof'"
    several = [{"q": "?", "a": ["proof", "2"]}]
    assert load_rows(tmp_path, several, fields={"prompt": "q", "solutions": "a"}).problems[0].solutions == ["2"]
    with pytest.raises(ProblemError, match="holds no rows that can be used"):
        load_rows(tmp_path, [rows[1], rows[2], rows[4]], fields={"prompt": "q", "solutions": "a"})


def test_only_scorers_that_need_solutions_refuse_problems_without(tmp_path: Path) -> None:
    """A game has none: no column, null or an empty list. A scorer decides by the source of problems."""
    golds: list[tuple[str, Any]] = [("sum", "1"), ("maze", None), ("sum", []), ("own", None)]
    rows = [{"q": "1?", "kind": kind, "a": gold} for kind, gold in golds]
    path, fields = write_rows(tmp_path / "rows.jsonl", *rows), {"prompt": "q", "source": "kind"}
    own = "tests.support.own_scorers:rewards"

    def bad(fields: Any, **types: str) -> list[int]:
        source = FileSource(kind="jsonl", path=str(path), fields=fields)
        found = load_problems(source, 0.9, partial(use_of_solutions, Score(type=types)))
        assert {row.reason.partition(":")[0] for row in found.bad} <= {"it has no solutions, and its scorer reads them"}
        return [row.where.line for row in found.bad]

    named = {**fields, "solutions": "a"}
    assert bad(named, default="environment", sum="math-verify", own=own) == [3, 4]
    assert bad(fields, default="environment", own=own) == []
    with pytest.raises(ProblemError, match="4 of 4 rows are bad"):
        bad(fields, default="math-verify")


def test_verifiers_rows(tmp_path: Path) -> None:
    """Rows of verifiers' environments keep what their environment needs; an answer may be missing."""
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}]
    row = {"example_id": 0, "prompt": asked, "answer": "3", "info": {"level": 1}, "question": "1 + 2?"}
    shots = [{"role": role, "content": said} for role, said in (("user", "2?"), ("assistant", "2"), ("user", "3?"))]
    others = [{"example_id": 1, "prompt": "Hi"}, {"example_id": 2, "prompt": shots, "answer": "", "info": None}]
    result = load_rows(tmp_path, [row, *others], preset="verifiers")
    metadata = json.dumps({"info": {"level": 1}, "prompt_messages": asked})
    assert result.problems == [
        Problem("0", "1 + 2?", ["3"], "verifiers", metadata),
        Problem("1", "Hi", [], "verifiers"),
        Problem("2", "2?\n\n2\n\n3?", [], "verifiers", json.dumps({"prompt_messages": shots})),
    ]


def test_verl_rows_without_ground_truth_are_refused(tmp_path: Path) -> None:
    """They have a place for it; only a scorer that ignores solutions takes them."""
    row = {"prompt": "1?", "data_source": "sum", "reward_model": {"ground_truth": "1"}, "extra_info": {"index": 7}}
    path = write_rows(tmp_path / "rows.jsonl", row, row | {"reward_model": {"ground_truth": None}})
    source = FileSource(kind="jsonl", path=str(path), preset="verl")
    uses: dict[UseOfSolutions, int] = {"needs": 1, "may read": 1, "ignores": 0}
    assert {use: len(load_problems(source, 0.9, dict.fromkeys(["sum"], use).__getitem__).bad) for use in uses} == uses


def test_presets_are_those_of_the_schema() -> None:
    """Every preset that the configuration allows exists, for files and for the hub."""
    for source in (FileSource, HubSource):
        names = [name for option in get_args(source.model_fields["preset"].annotation) for name in get_args(option)]
        assert sorted(names) == sorted(PRESETS | MAPPINGS)


# Files


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"key": "x", "ask": ', "not JSON: Expecting value: line 1 column 20"),
        (b'{"key": "x", "ask": "\xff\xfe"}', "not JSON: 'utf-8' codec can't decode byte 0xff in position 21"),
        (b"[1, 2]", "a JSON list where an object is needed"),
        (b"[" * 100_000, "not JSON: maximum recursion depth"),
        (b"9" * 5000, "not JSON: Exceeds the limit"),
        ({"key": "x", "ask": "Why?"}, "no column 'gold'; there are key, ask"),
        ({"key": "x", "ask": "Why?", "gold": 0.1}, "column 'gold' is not text: 0.1"),
        ({"key": "x", "ask": " \n", "gold": "1"}, "column 'ask' is blank"),
        ({"key": None, "ask": "Why?", "gold": "1"}, "column 'key' is not text: None"),
        ({"key": "x", "ask": "\ud800", "gold": "1"}, "column 'ask' holds half a surrogate pair"),
    ],
)
def test_bad_row_is_dropped_with_line_and_reason(tmp_path: Path, line: Any, reason: str) -> None:
    """One bad row is reported and does not stop the import; blank lines count as lines but not as rows."""
    result = load_rows(tmp_path, [GOOD, b"", line, GOOD | {"key": "last"}], fields=NAMED)
    assert [problem.problem_id for problem in result.problems] == ["good", "last"]
    assert [row.where.line for row in result.bad] == [3]
    assert result.bad[0].reason.startswith(reason)
    assert len(result.bad[0].reason) < 200


def test_share_of_bad_rows(tmp_path: Path) -> None:
    """The allowed share of bad rows passes; a larger one fails and names the first bad lines."""
    rows = [GOOD | {"ask": f"{number}?"} for number in range(6)] + [{}, {}]
    assert len(load_rows(tmp_path, rows, max_bad_share=0.25).bad) == 2
    too_many = r"rows.jsonl: 2 of 8 rows are bad \(problems.max_bad_share=0.24\).*\n +line 7: no column 'ask'"
    with pytest.raises(ProblemError, match=too_many):
        load_rows(tmp_path, rows, max_bad_share=0.24)


@pytest.mark.parametrize("path", ["nope://x", "nope://x/*.jsonl"])
def test_unknown_protocol(path: str) -> None:
    """The error names the path and the cause."""
    with pytest.raises(ProblemError, match=f"^{re.escape(path)} cannot be read .*Protocol not known.*: check path"):
        load_file(path, 0.0)


def test_empty_file(tmp_path: Path) -> None:
    """A file without rows is an error, not an empty problem set."""
    with pytest.raises(ProblemError, match=r"rows.jsonl holds no rows"):
        load_rows(tmp_path, [b""])
    with pytest.raises(ProblemError, match=r"x.parquet holds no rows"):
        load_file(write_rows(tmp_path / "x.parquet"), kind="parquet")


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    """One broken string makes only its own row bad; row numbers continue over batches of 64 rows."""
    count, broken = 200, 199
    asked = pa.array([b"\xff" if row == broken else b"q" for row in range(1, count + 1)])
    pq.write_table(pa.table({"ask": asked.view(pa.string()), "gold": ["1"] * count}), tmp_path / "x.parquet")
    result = load_file(tmp_path / "x.parquet", 0.1, kind="parquet")
    reason = "a value cannot be read: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
    assert result.bad == [BadRow(Where(broken), reason)]
    assert (len(result.problems), result.problems[-1].problem_id) == (count - 1, "000200")


def test_file_that_is_not_parquet(tmp_path: Path) -> None:
    """A file of the wrong kind and a truncated one are named in the error."""
    whole, cut = write_rows(tmp_path / "rows.parquet", GOOD), tmp_path / "cut.parquet"
    cut.write_bytes(whole.read_bytes()[:-20])
    for path in (write_rows(tmp_path / "rows.jsonl", GOOD), cut):
        with pytest.raises(ProblemError, match=f"^{path} cannot be read .*check path, permissions and kind"):
            load_file(path, kind="parquet")


# Hugging Face data sets


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Disable the network and the user's cache; the libraries read both settings when they are imported."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets, hub = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("offline")
def test_hub_rows_from_a_folder(tmp_path: Path) -> None:
    """A data set folder is read like a hub data set, with preset and count."""
    write_rows(tmp_path / "set/train.jsonl", *({"question": f"Q{n}", "answer": f"#### {n}"} for n in range(3)))
    source = HubSource(kind="hub", name=str(tmp_path / "set"), preset="gsm8k", count=2)
    problems = [Problem("000001", "Q0", ["0"], "gsm8k"), Problem("000002", "Q1", ["1"], "gsm8k")]
    assert load_problems(source, 0.0) == ProblemSet(problems, bad=[])


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["nobody/no-such-set", "./no-such-folder"])
def test_hub_data_set_out_of_reach(name: str) -> None:
    """The error names the data set and the way that needs no network."""
    remedy = "without a network, download its files and use kind jsonl or parquet"
    with pytest.raises(ProblemError, match=f"'{name}' .*{remedy}"):
        load_problems(HubSource(kind="hub", name=name, preset="gsm8k"), 0.0)
