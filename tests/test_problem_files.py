"""Several files as one problem set: each row keeps its id when more files come, and none is lost without a word."""

import json
import re
from pathlib import Path
from typing import Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import FileSource, StoredSource
from storage.records import Problem
from tasks.problems import BadRow, ProblemError, ProblemSet, load_problems
from tasks.problems.files import find

FIELDS: dict[Literal["id", "prompt", "solutions"], str] = {"prompt": "ask", "solutions": "gold"}
NAMED: dict[Literal["id", "prompt", "solutions"], str] = {"id": "key", **FIELDS}


def write(path: Path, *rows: Any) -> Path:
    """A JSONL file; text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def row(prompt: str, **more: str) -> dict[str, str]:
    return {"ask": prompt, "gold": "1", **more}


def load(path: str | Path, max_bad_share: float = 0.9, **knobs: Any) -> ProblemSet:
    knobs = knobs if {"fields", "preset"} & knobs.keys() else {"fields": FIELDS, **knobs}
    return load_problems(FileSource(kind=knobs.pop("kind", "jsonl"), path=str(path), **knobs), max_bad_share)


def ids(found: ProblemSet) -> list[str]:
    return [problem.problem_id for problem in found.problems]


def test_ids_do_not_move_when_files_come(tmp_path: Path) -> None:
    """What is known of a problem is kept under its id: a file that comes between others changes none of theirs."""
    write(tmp_path / "2026-11-20.jsonl", row("p"), row("q"))
    write(tmp_path / "2026-11-22.jsonl", row("r"))
    before = load(tmp_path / "*.jsonl").problems
    assert [(problem.problem_id, problem.prompt) for problem in before] == [
        ("2026-11-20/000001", "p"),
        ("2026-11-20/000002", "q"),
        ("2026-11-22/000001", "r"),
    ]
    write(tmp_path / "2026-11-21.jsonl", "\n", row("s"))
    after = load(tmp_path / "*.jsonl").problems
    assert [problem for problem in after if problem.prompt != "s"] == before
    assert after[2].problem_id == "2026-11-21/000002"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("new/*.jsonl", ["a/000001", "b/000001"]),
        ("new/?.jsonl", ["a/000001", "b/000001"]),
        ("new/[b-z].jsonl", ["b/000001"]),
        ("*/a.jsonl", ["new/a/000001", "old/a/000001"]),
        ("ne[w]/deep/*/rows*", ["new/deep/c.d/rows.v1/000001"]),
        ("**/rows.v1.jsonl", ["new/deep/c.d/rows.v1/000001"]),
        ("new/a*", ["a/000001"]),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    """Ids begin with the part of the path that the pattern leaves open; folders and hidden files are passed over."""
    for name in ("new/a.jsonl", "new/.c.jsonl", "new/b.jsonl", "old/a.jsonl", "new/deep/c.d/rows.v1.jsonl"):
        write(tmp_path / name, row(name))
    (tmp_path / "new" / "a-folder").mkdir()
    assert ids(load(tmp_path / pattern)) == expected
    assert ids(load(f"file://{tmp_path}/{pattern}")) == expected


def test_relative_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern counts from the working directory, like a path."""
    write(tmp_path / "new" / "a.jsonl", row("p"))
    monkeypatch.chdir(tmp_path)
    assert ids(load("new/*.jsonl")) == ["a/000001"]


def test_one_file_is_as_it_was(tmp_path: Path) -> None:
    """Sets imported before keep their fingerprints: neither a plain path nor one with odd marks adds to the ids."""
    plain = load(write(tmp_path / "rows.jsonl", row("p"), row("q")))
    odd = load(write(tmp_path / "rows [final].jsonl", row("p"), row("q")))
    assert plain.problems == odd.problems == [Problem("000001", "p", ["1"]), Problem("000002", "q", ["1"])]
    assert find("rows.jsonl") == [("", "rows.jsonl")]


def test_query_of_a_url_is_no_pattern() -> None:
    """Question marks belong to URLs, and what is in an archive is not looked up: both are opened as they are."""
    for path in ("https://example.org/rows.jsonl?download=true", "zip://*.jsonl::rows.zip"):
        assert find(path) == [("", path)]


def test_ids_of_several_files_begin_with_their_file(tmp_path: Path) -> None:
    """Also those that the rows bring, even one that looks like the number of its row."""
    write(tmp_path / "a.jsonl", row("p", key="000001"), row("q", key="x"))
    assert ids(load(tmp_path / "*.jsonl", fields=NAMED)) == ["a/000001", "a/x"]
    assert ids(load(tmp_path / "a.jsonl", fields=NAMED)) == ["000001", "x"]  # one file: as they are
    write(tmp_path / "b.math", {"problem": "p", "answer": "1", "unique_id": "t/7"}, {"problem": "q", "answer": "2"})
    assert ids(load(tmp_path / "*.math", preset="math")) == ["b/t/7", "b/000002"]
    write(tmp_path / "c.areal", {"query_id": "q1", "prompt": "p", "task": "math", "solutions": ["1"]})
    assert ids(load(tmp_path / "*.areal", preset="areal")) == ["c/q1"]
    write(tmp_path / "d.gsm", {"question": "q", "answer": "#### 1"})
    assert ids(load(tmp_path / "*.gsm", preset="gsm8k")) == ["d/000001"]


def test_the_same_id_in_two_files(tmp_path: Path) -> None:
    """Files that come day by day may number their rows anew, or bring a corrected answer; within one it is an error."""
    write(tmp_path / "a.jsonl", row("p", key="x"))
    write(tmp_path / "b.jsonl", row("q", key="y"), row("r", key="x"), row("s", key="x"))
    found = load(tmp_path / "*.jsonl", fields=NAMED)
    assert ids(found) == ["a/x", "b/y", "b/x"]
    assert found.bad == [BadRow(3, "id 'b/x' is already on line 2 of b.jsonl", "b.jsonl")]
    assert found.bad[0].place == "line 3 of b.jsonl"
    with pytest.raises(ProblemError, match=r"\n  line 3 of b.jsonl: id 'b/x' is already on line 2 of b.jsonl$"):
        load(tmp_path / "*.jsonl", 0.0, fields=NAMED)


def test_files_of_one_stem(tmp_path: Path) -> None:
    """Files that differ in their suffix alone would give the same ids: the rows of the second are reported."""
    write(tmp_path / "a.json", row("p"))
    write(tmp_path / "a.jsonl", row("q"))
    found = load(tmp_path / "*")
    assert ids(found) == ["a/000001"]
    assert found.bad == [BadRow(1, "id 'a/000001' is already on line 1 of a.json", "a.jsonl")]


def test_file_that_is_being_written(tmp_path: Path) -> None:
    """Half a line is a bad row of its file, and its id is free for the whole row when it is there."""
    write(tmp_path / "a.jsonl", row("p"))
    late = write(tmp_path / "b.jsonl", row("q"), '{"ask": "r", "go')
    write(tmp_path / "c.jsonl")
    found = load(tmp_path / "*.jsonl")
    assert ids(found) == ["a/000001", "b/000001"]
    assert [(bad.place, bad.reason[:9]) for bad in found.bad] == [("line 2 of b.jsonl", "not JSON:")]
    write(late, row("q"), row("r"))
    assert ids(load(tmp_path / "*.jsonl", 0.0)) == ["a/000001", "b/000001", "b/000002"]


def test_count_is_of_all_files(tmp_path: Path) -> None:
    """The limit goes over file borders and counts bad rows, and what lies behind it is not even opened."""
    for name in ("a", "b"):
        pq.write_table(pa.table({"ask": [name, None], "gold": ["1", "1"]}), tmp_path / f"{name}.parquet")
    write(tmp_path / "c.parquet", "no Parquet")
    found = load(tmp_path / "*.parquet", kind="parquet", count=3)
    assert ids(found) == ["a/000001", "b/000001"]
    assert found.bad == [BadRow(2, "column 'ask' is not text: None", "a.parquet")]


@pytest.mark.parametrize("folder", ["", "missing/"])
def test_no_match(tmp_path: Path, folder: str) -> None:
    """A pattern that finds nothing is an error that names it, not an empty set."""
    pattern = f"{tmp_path}/{folder}*.jsonl"
    with pytest.raises(ProblemError, match=f"^{re.escape(pattern)} matches no file: check folder and pattern$"):
        load(pattern)


def test_unknown_protocol() -> None:
    """What cannot be listed is named like what cannot be opened."""
    with pytest.raises(ProblemError, match=r"^nope://x/\*.jsonl cannot be read .*Protocol not known"):
        load("nope://x/*.jsonl")


def test_files_without_rows(tmp_path: Path) -> None:
    """Files that are all empty are an error, as one is."""
    write(tmp_path / "a.jsonl")
    with pytest.raises(ProblemError, match=r"\*.jsonl holds no rows"):
        load(tmp_path / "*.jsonl")


def test_parquet_files(tmp_path: Path) -> None:
    """Parquet files are found and named in the same way, and one that is none is named by its path."""
    for name in ("a", "b"):
        pq.write_table(pa.table({"ask": [name, None], "gold": ["1", "1"]}), tmp_path / f"{name}.parquet")
    found = load(tmp_path / "*.parquet", kind="parquet")
    assert ids(found) == ["a/000001", "b/000001"]
    assert [bad.place for bad in found.bad] == ["line 2 of a.parquet", "line 2 of b.parquet"]
    broken = write(tmp_path / "c.parquet", "no")
    with pytest.raises(ProblemError, match=f"^{re.escape(str(broken))} cannot be read .*kind"):
        load(tmp_path / "*.parquet", kind="parquet")


def test_remote_pattern() -> None:
    """Patterns work in any store that fsspec lists, and see files that came after the first look."""
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/several/new/a.jsonl", json.dumps(row("p")).encode())
    assert ids(load("memory://several/new/*.jsonl")) == ["a/000001"]
    memory.pipe_file("/several/new/b.jsonl", json.dumps(row("q")).encode())
    assert ids(load("memory://several/new/*.jsonl")) == ["a/000001", "b/000001"]


def test_stored_set_is_not_loaded() -> None:
    """Without a store there is nothing to read a version from: the error says so before anything else fails."""
    with pytest.raises(ValueError, match=r"^problems/12ab: a stored set is read from the store, not loaded$"):
        load_problems(StoredSource(kind="stored", version="problems/12ab"), 0.0)
