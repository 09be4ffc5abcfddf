"""Several files as one problem set: ids stay the same when files are added, and no row is lost silently."""

import bz2
import gzip
import json
import lzma
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.records import Problem
from tasks.problems import BadRow, ProblemError, ProblemSet
from tasks.problems.problem_set import Where
from tests.support.problem_files import NAMED, load_file, write_rows

PRESET_ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "p", "answer": "#### 1"},
    "areal": {"query_id": "u", "prompt": "p", "task": "math", "solutions": ["1"]},
}


def row(prompt: str, **more: str) -> dict[str, str]:
    return {"ask": prompt, "gold": "1", **more}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest row has 1 MB."""
    monkeypatch.setattr("tasks.problems.sources.LONGEST_MB", 1)


def ids(found: ProblemSet) -> list[str]:
    return [problem.problem_id for problem in found.problems]


def test_ids_do_not_move_when_files_come(tmp_path: Path) -> None:
    """A curriculum knows problems by their ids, so a new file between others changes none of their ids."""
    write_rows(tmp_path / "2026-11-20.jsonl", row("p"), row("q"))
    write_rows(tmp_path / "2026-11-22.jsonl", row("r"))
    before = load_file(tmp_path / "*.jsonl").problems
    names = ["2026-11-20/000001", "2026-11-20/000002", "2026-11-22/000001"]
    assert [(problem.problem_id, problem.prompt) for problem in before] == list(zip(names, "pqr", strict=True))
    write_rows(tmp_path / "2026-11-21.jsonl", "", row("s"))
    after = load_file(tmp_path / "*.jsonl").problems
    assert [problem for problem in after if problem.prompt != "s"] == before
    assert after[2].problem_id == "2026-11-21/000002"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("new/*.jsonl", ["a/000001", "b/000001"]), ("new/?.jsonl", ["a/000001", "b/000001"]),
        ("new/[b-z].jsonl", ["b/000001"]), ("*/a.jsonl", ["new/a/000001", "old/a/000001"]),
        ("ne[w]/deep/*/rows*", ["new/deep/c.d/rows.v1/000001"]),
        ("**/rows.v1.jsonl", ["new/deep/c.d/rows.v1/000001"]), ("new/a*", ["a/000001"]),
        ("sets/y*.jsonl", ["000001"]),
    ],
)  # fmt: skip
def test_patterns(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    """Ids begin with the variable part of the path; folders and hidden files are skipped. A file is no pattern."""
    of_new = ("a", ".c", "b", "deep/c.d/rows.v1")
    for name in (*(f"new/{each}" for each in of_new), "old/a", "sets/y*", "sets/y1"):
        write_rows(tmp_path / f"{name}.jsonl", row(name))
    (tmp_path / "new" / "a-folder").mkdir()
    assert ids(load_file(tmp_path / pattern)) == expected
    assert ids(load_file(f"file://{tmp_path}/{pattern}")) == expected


def test_one_file_is_as_it_was(tmp_path: Path) -> None:
    """A single file adds nothing to the ids, so sets imported earlier keep their fingerprints."""
    plain = load_file(write_rows(tmp_path / "rows.jsonl", row("p"), row("q")))
    for name in ("rows [final].jsonl", "train[1].jsonl", "best*.jsonl", "what?/a#b.jsonl"):
        for other in ("train1.jsonl", "best-of-all.jsonl", "whats/a#b.jsonl"):
            write_rows(tmp_path / other, row("another"))
        assert load_file(write_rows(tmp_path / name, row("p"), row("q"))).problems == plain.problems
    assert plain.problems == [Problem("000001", "p", ["1"]), Problem("000002", "q", ["1"])]


def test_a_folder_may_have_brackets_in_its_name(tmp_path: Path) -> None:
    """They are no pattern, so the folder is found, and not another one that the pattern would match."""
    for name in ("run[1]", "run1"):
        write_rows(tmp_path / name / "a.jsonl", row(name))
    assert [problem.prompt for problem in load_file(tmp_path / "run[1]/*.jsonl").problems] == ["run[1]"]
    assert ids(load_file(tmp_path / "run[1]/*.jsonl")) == ids(load_file(tmp_path / "run1/*.jsonl")) == ["a/000001"]


def test_the_same_id_in_two_files(tmp_path: Path) -> None:
    """The same id may occur in two files, such as daily files that count from 1, and twice in one."""
    write_rows(tmp_path / "a.jsonl", row("p", key="x"))
    write_rows(tmp_path / "b.jsonl", row("q", key="y"), row("r", key="x"), row("s", key="x"))
    assert ids(load_file(tmp_path / "*.jsonl", fields=NAMED)) == ["a/x", "b/y", "b/x", "b/x~3"]


def test_count_is_of_all_files(tmp_path: Path) -> None:
    """The limit `count` covers all files and includes bad rows; files beyond it are not opened."""
    for name in ("a", "b"):
        write_rows(tmp_path / f"{name}.parquet", row(name), {"ask": None, "gold": "1"})
    (tmp_path / "c.parquet").touch()
    found = load_file(tmp_path / "*.parquet", kind="parquet", count=3)
    assert ids(found) == ["a/000001", "b/000001"]
    assert found.bad == [BadRow(Where(2, "a.parquet"), "column 'ask' is not text: None")]


@pytest.mark.parametrize("folder", ["", "missing/"])
def test_no_match(tmp_path: Path, folder: str) -> None:
    """A pattern without a match is an error that names the pattern, not an empty set."""
    pattern = f"{tmp_path}/{folder}*.jsonl"
    with pytest.raises(ProblemError, match=f"^{re.escape(pattern)} matches no file: check folder and pattern$"):
        load_file(pattern)


def test_remote_pattern() -> None:
    """Patterns work in any store that fsspec can list, and find files that are added later."""
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/several/new/a.jsonl", json.dumps(row("p")).encode())
    assert ids(load_file("memory://several/new/*.jsonl")) == ["a/000001"]
    memory.pipe_file("/several/new/b.jsonl", json.dumps(row("q")).encode())
    assert ids(load_file("memory://several/new/*.jsonl")) == ["a/000001", "b/000001"]


def _link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        *((make, "OSError: it is a folder, a pipe or a device") for make in (os.mkfifo, _link_to_pipe, Path.mkdir)),
        (lambda path: path.symlink_to("/dev/zero"), "OSError: it is a folder, a pipe or a device"),
        (lambda path: path.symlink_to("nowhere"), "FileNotFoundError"),
    ],
)
def test_a_file_that_is_not_regular_is_refused(
    make: Callable[[Path], Any], reason: str, kind: Literal["jsonl", "parquet"], tmp_path: Path
) -> None:
    """A pipe without a writer or an endless device would block a night and its lease for ever; both are refused."""
    path = tmp_path / "rows.x"
    make(path)
    for where in (str(path), f"file://{path}"):
        with pytest.raises(ProblemError, match=f"^{re.escape(where)} cannot be read .*{reason}"):
            load_file(where, kind=kind)
    if make is not Path.mkdir:  # a pattern skips folders
        with pytest.raises(ProblemError, match=f"^{re.escape(str(path))} cannot be read .*{reason}"):
            load_file(tmp_path / "*.x", kind=kind)


TWO = b'{"ask": "p", "gold": "1"}\n{"ask": "\xc3\xa9", "gold": "1"}\n'
"""A file of two rows, the second with a letter that is not ASCII."""


PACKED = {
    "gz": gzip.compress(TWO),
    "two members": gzip.compress(TWO[:30]) + gzip.compress(TWO[30:]),
    "bz2": bz2.compress(TWO),
    **{name: pa.compress(TWO, name, asbytes=True) for name in ("zstd", "lz4")},
    "mark": TWO.decode().encode("utf-8-sig"),
}


@pytest.mark.parametrize("data", PACKED.values(), ids=PACKED)
def test_packed_files_are_read(tmp_path: Path, data: bytes) -> None:
    """Their first bytes tell what they are, whatever their names; a bound on lines holds for what is unpacked."""
    (tmp_path / "rows.x").write_bytes(data)
    found = load_file(tmp_path / "rows.x").problems
    assert found == [Problem("000001", "p", ["1"]), Problem("000002", "\u00e9", ["1"])]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (gzip.compress(TWO * 99)[:-9], r"cannot be read \(OSError: Truncated compressed stream\)"),
        (gzip.compress(b" " * 2**21), "line 1 has more than 1 MB"),
        (json.dumps([row("p"), row("q")]).encode(), r"is one JSON array: write its items on lines of their own"),
        (gzip.compress(b"\n [\n" + TWO), "is one JSON array"),
        (b"PAR1" + bytes(99), "is Parquet, not JSONL"),
        (b"PK\x03\x04" + bytes(99), "is an archive: unpack it"),
        (lzma.compress(TWO), "is an archive: unpack it"),
        *((TWO.decode().encode(name), "is UTF-16: write it in UTF-8") for name in ("utf-16", "utf-16-le", "utf-16-be")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # compressed data differ each time
)
@pytest.mark.usefixtures("short")
def test_what_a_file_is_instead_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    """Not as so many bad lines."""
    (tmp_path / "rows.jsonl").write_bytes(data)
    with pytest.raises(ProblemError, match=f"rows.jsonl:? {reason}"):
        load_file(tmp_path / "rows.jsonl")


def test_a_key_that_repeats_is_named(tmp_path: Path) -> None:
    """Readers of JSON keep either value in silence; here the row is bad, also where the key is inside of another."""
    twice, nested = '{"ask": "p", "gold": "3", "gold": "4"}', '{"ask": "q", "gold": "1", "more": [{"x": 1, "x": 1}]}'
    found = load_file(write_rows(tmp_path / "a.jsonl", row("p"), twice, nested))
    keys = {2: "gold", 3: "x"}
    assert found.bad == [BadRow(Where(at), f"not JSON: the key '{key}' is there twice") for at, key in keys.items()]


LONG = 2**20 - len(json.dumps(row("")))
"""The number of prompt characters that make a line of exactly 1 MB."""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.usefixtures("short")
def test_a_line_above_the_bound_is_an_error(tmp_path: Path, end: str, remote: bool) -> None:
    """A line of exactly the bound is read."""
    whole, longer = (json.dumps(row("p" * (LONG + more))) for more in (0, 1))
    path = "memory://long/rows.jsonl" if remote else str(tmp_path / "rows.jsonl")
    with fsspec.open(path, "wb") as file:
        file.write(end.join([whole, json.dumps(row("q")), longer, json.dumps(row("r"))]).encode())
    assert ids(load_file(path, count=2)) == ["000001", "000002"]
    with pytest.raises(ProblemError, match="rows.jsonl: line 3 has more than 1 MB, too long for a row"):
        load_file(path)


@pytest.mark.usefixtures("short")
def test_a_parquet_row_above_the_bound_is_a_bad_row(tmp_path: Path) -> None:
    """A Parquet row above the bound is reported like a line; the rows around it are read."""
    prompts = ["p", "q" * 2**20, "r", "s" * (2**20 - 100), "\N{GREEK SMALL LETTER PI}" * 2**19]
    found = load_file(write_rows(tmp_path / "rows.parquet", *map(row, prompts)), kind="parquet")
    assert ids(found) == ["000001", "000003", "000004"]
    assert found.bad == [BadRow(Where(line), "row of more than 1 MB") for line in (2, 5)]


@pytest.mark.usefixtures("short")
def test_unused_columns_are_not_read(tmp_path: Path) -> None:
    """They neither make a row bad, such as a date out of Python's range, nor count towards its length."""
    columns = {"ask": ["p"], "far": pa.array([10**17], pa.timestamp("ms")), "blob": [b"x" * 2_000_000], "gold": ["1"]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert ids(load_file(tmp_path / "a.parquet", kind="parquet")) == ["000001"]
    with pytest.raises(ProblemError, match="no column 'tell'; there are ask, far, blob, gold"):
        load_file(tmp_path / "a.parquet", kind="parquet", fields={"prompt": "tell", "solutions": "gold"})
    with pytest.raises(ProblemError, match="line 1: a value cannot be read"):
        load_file(tmp_path / "a.parquet", kind="parquet", fields={"prompt": "far", "solutions": "gold"})


@pytest.mark.parametrize(("preset", "row"), PRESET_ROWS.items())
def test_presets_have_the_columns_that_they_read(preset: str, row: dict[str, Any], tmp_path: Path) -> None:
    """Only the preset's columns are read from Parquet; the problems equal those from JSON."""
    paths = {kind: write_rows(tmp_path / f"a.{kind}", {**row, "other": 1}) for kind in ("parquet", "jsonl")}
    found = [load_file(path, kind=kind, preset=preset).problems for kind, path in paths.items()]
    assert found[0] == found[1]
