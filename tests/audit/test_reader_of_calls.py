"""The reader's pages about calls of tools, branches, ungraded turns and parts of rewards."""

import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape

import pytest
from starlette.testclient import TestClient

from configs.audit import Audit
from storage.objects.store import Store
from storage.records import Call, Score, Trajectory
from tasks.audit.data_sets import fetch_data_sets, select
from tasks.audit.database import open_database
from tasks.audit.reader.app import create_app
from tests.support.reader_helpers import EVIL, HOSTILE, PLAIN, commit, spoken

LONG = "line\n" * 300
FAILED = Call(0, "c2", "search", '{"query": "x"}', "error: no such page", "failed")
CALLS = [Call(0, "c1", "calculator", HOSTILE, HOSTILE, "answered"), FAILED]


def rows() -> list[Trajectory]:
    """Return a row with calls, one with branches, and one with neither."""
    plain, called, branched = (spoken(PLAIN, name, ["one", "two"], name) for name in ("plain", "called", "branched"))
    told = replace(called.turns[0], feedback=f"{HOSTILE}\nerror: no such page")
    called = replace(called, calls=[*CALLS, Call(1, "c3", "", LONG, "", "unparsable")], turns=[told, called.turns[1]])
    third = replace(branched.turns[1], start=branched.turns[1].end + 5, end=branched.turns[1].end + 8, text="three")
    fourth = replace(third, start=third.end + 2, end=third.end + 3, text="four")
    ids = [*branched.token_ids, *branched.token_ids[: branched.turns[0].end], 21, 22, 23, 24, 25]
    count = len(ids) - len(branched.token_ids)
    return [
        plain,
        replace(called, ungraded=[0], reward_parts=[{}, {"format": 0.25}]),
        replace(
            branched,
            token_ids=ids,
            action_mask=[*branched.action_mask, *[False] * count],
            logprobs=[*branched.logprobs, *[0.0] * count],
            versions=[*branched.versions, *[-1] * count],
            turns=[*branched.turns, third, fourth],
            sequence_starts=[0, len(branched.token_ids), third.end],
            follows=[-1, 0, 0, -1],
        ),
    ]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("reader")
    store = Store(str(folder / "store"))
    scores = [
        Score("called", 0, "none", 0.0, "", "", "", 0.0),
        Score("called", 1, "wrong", 0.0, "two", "2", "", 0.25, {"format": 0.25}),
    ]
    commit(store, PLAIN, (rows(), scores), [])
    data_sets = select(store, [])
    with open_database(data_sets, fetch_data_sets(store, data_sets, folder), Audit()) as database:
        yield TestClient(create_app(store, data_sets, database, folder), base_url="http://127.0.0.1:8000")


def text(page: str) -> str:
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "", page)))


def test_calls_are_shown_under_their_turn(reader: TestClient) -> None:
    """Name, arguments, output and status; a long one is folded, and a hostile one is only text."""
    html = reader.get("/trajectory?id=called").text
    page = text(html[html.index("<h2") :])
    parts = ["Turn 1", "not graded", "Call of calculator answered", "Call of search failed", "error: no such page"]
    places = [page.index(part) for part in [*parts, "Turn 2", "Call of no tool unparsable", "Tokens"]]
    assert places == sorted(places)
    assert "Feedback" not in page, "the outputs are the whole feedback"
    assert "reward 0.25 (format 0.25), 0 from the environment" in page
    assert re.search(r"<details><summary>Arguments, 1,500 characters: <code>line …</code></summary>", html)
    assert EVIL not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;&#39;&#34;{{ 7 * 7 }} ⟨U+202E⟩ltr") >= 2
    assert "Gold" not in page[page.index("Turn 1") : page.index("Turn 2")]
    for name, whole in (("arguments-2-1", LONG), ("output-1-2", FAILED.output)):
        assert reader.get("/text", params={"id": "called", "of": name}).text == whole


def test_branches_are_named(reader: TestClient) -> None:
    """The page says where a sequence begins, why, and which turn a turn follows."""
    html = reader.get("/trajectory?id=branched").text
    page = text(html)
    assert "Sequence 1 of 3 begins a conversation. Turn 1" in page
    assert "Sequence 2 of 3 is a branch: it repeats the tokens up to turn 1, and goes on from there. Turn 3" in page
    assert '<a href="#turn-1">turn 1</a>' in html
    assert "Turn 3 follows turn 1" in page
    assert "Turn 4 begins another conversation" in page
    plain = text(reader.get("/trajectory?id=plain").text)
    assert not re.search("Sequence|follows turn|Call of|not graded", plain)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("calls=some", ["called"]),
        ("calls=failed", ["called"]),
        ("calls=unanswered", []),
        ("calls=none&order=calls", ["branched", "plain"]),
        ("order=calls", ["called", "branched", "plain"]),
    ],
)
def test_the_list_finds_calls(reader: TestClient, query: str, found: list[str]) -> None:
    """A filter and an order; a line says how many calls it has."""
    html = reader.get(f"/?{query}").text
    assert re.findall(r'role="rowheader"><a[^>]*>([^<]*)<', html) == found
    assert ("3 calls" in text(html)) == ("called" in found)
    assert "Calls of tools" in html


def test_an_unknown_status_is_refused(reader: TestClient) -> None:
    """A mistyped filter says what there is."""
    assert "Calls of tools: 'lost' is not known: choose some, none" in text(reader.get("/?calls=lost").text)


def test_a_group_shows_calls(reader: TestClient) -> None:
    """Side by side, too, with what answers nothing."""
    page = text(reader.get("/group?data_set=runs/shared/trajectories/000000&problem=called").text)
    assert "answers nothing" in page
    assert "Call of search failed" in page
