import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from configs.algorithms import NAMES
from configs.audit import Audit
from storage import layout
from storage.objects.seal import seal, unseal
from storage.objects.store import Store
from storage.records import CASE_SCHEMA, Call, Score, Trajectory, VerdictName
from tasks.audit.__main__ import _read, unreadable
from tasks.audit.database import open_database
from tasks.audit.reader.library import Library
from tasks.audit.reader.serving import require_key
from tasks.audit.reader.tokens import compute_advantages
from tasks.audit.reader.views import create_app
from tasks.tables.sets import DataSet, fetch_data_sets, select
from tests.conftest import commit_policy
from tests.support.reader_helpers import CALLED, CRITIC, EVIL, HOSTILE, NORMALISED, PLAIN, commit, spoken, strange, sums
from tests.support.train_helpers import make_scores, make_trajectory

GROUP = "/group?data_set=runs/shared/trajectories/000000&problem=7"


LINES = "line\n" * 300
FAILED = Call(0, "c2", "search", '{"query": "x"}', "error: no such page", "failed")
CALLS = [Call(0, "c1", "calculator", HOSTILE, HOSTILE, "answered"), FAILED]


def rows_with_calls() -> tuple[list[Trajectory], list[Score]]:
    """Return a row with calls, one with branches, and one with neither."""
    plain, called = (spoken(CALLED, name, ["one", "two"], name) for name in ("plain", "called"))
    told = replace(called.turns[0], feedback=f"{HOSTILE}\nerror: no such page")
    called = replace(called, calls=[*CALLS, Call(1, "c3", "", LINES, "", "unparsable")], turns=[told, called.turns[1]])
    called = replace(called, ungraded=[0], reward_parts=[{}, {"format": 0.25}])
    branched = replace(make_trajectory("branched", [[7], [8], [9], [10]]), follows=[-1, 0, 0, -1])
    branched = replace(branched, sequence_starts=[0, *(turn.start for turn in branched.turns[2:])])
    scores = [Score("called", 0, "none", 0.0, "", "", "", 0.0)]
    scores += [Score("called", 1, "wrong", 0.0, "two", "2", "", 0.25, {"format": 0.25})]
    return [plain, called, branched], scores


@pytest.fixture(scope="module")
def filled(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(str(tmp_path_factory.mktemp("reader")))
    policy = commit_policy(store, 0, policy_folder).version
    made = [sums(PLAIN, 30), strange(), sums(NORMALISED, 2), sums(CRITIC, 2), rows_with_calls()]
    for iteration, rows in enumerate(made):
        commit(store, iteration, rows, [policy])
    return store


@pytest.fixture(scope="module")
def reader(filled: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of the reader, with a folder as an audit leaves it."""
    folder = tmp_path_factory.mktemp("audit")
    cases = [("loops", "turn", "0/3/1", ""), ("same", "group", "7", layout.trajectories("shared", PLAIN))]
    rows = [dict(zip(CASE_SCHEMA.names, (n, *case, HOSTILE), strict=True)) for n, case in enumerate(cases)]
    pq.write_table(pa.Table.from_pylist(rows, CASE_SCHEMA), folder / "cases.parquet")
    with opened(filled, folder, folder) as client:
        yield client


@contextmanager
def opened(store: Store, folder: Path, audit: Path | None = None) -> Iterator[TestClient]:
    """Open the reader for all data sets of a store."""
    data_sets = select(store, [])
    intake = fetch_data_sets(store, data_sets, folder)
    with open_database(data_sets, intake, Audit()) as database:
        app = create_app(store, data_sets, database, folder, audit, unreadable(data_sets, intake))
        yield TestClient(app, base_url="http://127.0.0.1:8000")


@contextmanager
def library(policy: Path, rows: Any, folder: Path, **knobs: Any) -> Iterator[tuple[Library, DataSet]]:
    """Open a data set that a policy has played."""
    store = Store(f"{folder}/store")
    commit(store, PLAIN, rows, [commit_policy(store, 0, policy).version], **knobs)
    data_sets = select(store, [])
    with open_database(data_sets, fetch_data_sets(store, data_sets, folder), Audit()) as database:
        yield Library(database), data_sets[0]


def text(page: str) -> str:
    """Return the visible text of a page."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "", page)))


def ids(page: str) -> list[str]:
    """Return the ids in the first cells of the list."""
    return [unescape(found) for found in re.findall(r'role="rowheader"><a[^>]*>([^<]*)<', page)]


FILTERS = """
     146 0/0/0
data_set=TRAJECTORIES/000002 8 2/0/0
data_set=000000&verdict=correct&turn=2 30 0/0/1
data_set=000000&verdict=wrong&turn=last 60 0/0/2
verdict=unscored&data_set=000001 6 evil/<script>
data_set=000000&most=0.5&turn=2 30 0/0/2
status=truncated&data_set=000000 1 0/0/3
text=BOXED%7B5&data_set=000000 30 0/0/2
text=100%25+wrong_&data_set=000000 60 0/0/1
check=loops 1 0/3/1
check=same 4 0/7/0
"""


@pytest.mark.parametrize("line", FILTERS.strip("\n").splitlines())
def test_filters(reader: TestClient, line: str) -> None:
    """Each filter finds its rows: literal text, and verdicts and rewards of the selected turn."""
    query, count, first = line.rsplit(maxsplit=2) if line[0] != " " else ("", *line.split())
    page = reader.get(f"/?{query}").text
    assert re.search(rf"\b{count}( of 146)? trajector", text(page))
    assert ids(page)[0].startswith(first)


def test_the_list_goes_page_by_page(reader: TestClient) -> None:
    """A page has fifty lines and keeps the filter; a page number too large shows the last page.

    A trajectory links its neighbours in the list.
    """
    first, last = reader.get("/?data_set=000000").text, reader.get("/?data_set=000000&page=3").text
    assert (len(ids(first)), len(ids(last))) == (50, 20)
    assert "101 to 120" in text(last)
    assert ids(reader.get("/?data_set=000000&page=999").text) == ids(last)
    assert 'href="/?data_set=000000&amp;page=2"' in first
    page = reader.get("/trajectory?id=0/0/2&status=completed").text
    assert re.search(r'rel="next" href="/trajectory\?id=0%2F1%2F0&amp;row=\d+&amp;status=completed', page)
    assert re.search(r"3 of \d+ in the list", text(page))
    links = re.findall(r'href="(/trajectory[^"]*)"', reader.get("/?problem=twice").text)  # two rows with one id
    pages = [reader.get(unescape(link)).text for link in links]
    assert [">first<" in pages[0], ">second<" in pages[1]] == [True, True]


def test_a_trajectory_is_read_turn_by_turn_and_token_by_token(reader: TestClient) -> None:
    """The page has verdicts, answer, gold and the run's tokens; no content depends on mouse or colour alone."""
    html = reader.get("/trajectory?id=0/7/1").text
    page = text(html[html.index("<h2") :])
    parts = ["What is 7 + 1?", "Turn 1", "wrong", "\\boxed{3}", "100% wrong_, try again", "Turn 2", "correct"]
    positions = [page.index(part) for part in parts]
    assert positions == sorted(positions)
    assert "3 tokens, mean logprob -0.3" in page
    assert len(re.findall(r'class="token p2" title="[^"]*logprob -0.3, policy version 0"', html)) == 5
    assert "Logprob</th>" in html


@pytest.mark.parametrize(("sample", "advantages"), [(0, [1.5]), (1, [0.5, 1.0]), (2, [-1.5, -1.0]), (3, [-0.5])])
def test_advantages_are_those_of_the_update(reader: TestClient, sample: int, advantages: list[float]) -> None:
    """The returns of first turns are 1, 0, -2, -1, of second ones 1, -1, each minus its mean (by hand)."""
    page = reader.get(f"/trajectory?id=0/7/{sample}&colour=advantage").text
    of_turns = [re.findall(r'title="[^"]*advantage ([^",]+)', part) for part in page.split("<h3>Turn")[1:]]
    assert [{float(found) for found in of_turn} for of_turn in of_turns] == [{advantage} for advantage in advantages]
    assert "from the 4 trajectories of the group" in text(page)


def test_the_least_reward_is_that_of_the_whole_data_set(policy_folder: Path, tmp_path: Path) -> None:
    """An episode that filled the context earns what another problem's hole did, though only its group is loaded."""
    rows = [make_trajectory(name, [[10]], problem=name[0]) for name in ("a hole", "b goal", "b lost")]
    rows[2] = replace(rows[2], status="truncated", fault="policy")
    given: dict[str, tuple[VerdictName, float]] = {"a hole": ("wrong", -1.0), "b goal": ("correct", 1.0)}
    given["b lost"] = "none", 0.0
    scores = [Score(name, 0, verdict, 0.0, "", "", "", reward) for name, (verdict, reward) in given.items()]
    knobs = {"score": {"type": "environment"}, "reward": {"shape": None}}
    with library(policy_folder, (rows, scores), tmp_path, **knobs) as (opened, data_set):
        computed = [compute_advantages(opened, data_set, row).by_position for row in rows[1:]]
    assert computed == [{3: 1.0}, {3: -1.0}]


def test_every_algorithm_shows_what_tokens_get(policy_folder: Path, tmp_path: Path) -> None:
    """Advantages, or weights in the cross-entropy; what needs another model, or code of the user's, is said.

    Code that a data set names is never imported.
    """
    rows = [make_trajectory("right", [[10], [11]]), make_trajectory("wrong", [[12]])]
    scores, found = [*make_scores("right", 0, 1), *make_scores("wrong", 0)], dict[str, Any]()
    with library(policy_folder, (rows, scores), tmp_path) as (opened, data_set):
        assert data_set.manifest
        for name in (*NAMES, "no_such_module:Class"):
            config = {"algorithm": {"type": name}, "rollout": {"max_head_offpolicyness": 9}}
            manifest = type(data_set.manifest).model_validate(data_set.manifest.model_dump() | {"config": config})
            try:
                found[name] = compute_advantages(opened, replace(data_set, manifest=manifest), rows[0]).by_position
            except ValueError as error:
                found[name] = str(error)
    # The returns are 0 and 1, and -1: so few reached the second turn that it is compared with all episodes.
    assert found["dr_grpo"] == {3: 0.5, 6: 1.0}
    assert found["rft"] == {3: 0.0, 6: 1.0}
    assert found["dpo"] == {3: 1.0, 6: 1.0}
    assert "needs the teacher's logprobs" in found.pop("opd")
    assert "which is no part of this program" in found.pop("no_such_module:Class")
    assert all(set(each) >= {3, 6} for each in found.values())


def test_what_is_missing_from_advantages_is_said(reader: TestClient) -> None:
    missing = {
        "2/0/1": "division by the root mean square",
        "3/0/0": "needs a critic's values",
        "long": "no score for turns [0]",
    }
    for name, says in missing.items():
        assert says in text(reader.get(f"/trajectory?id={name}&colour=advantage").text)


def test_hostile_text_is_only_text(reader: TestClient) -> None:
    """Scripts, templates, links and reordering in texts, ids and addresses are escaped and spelled out."""
    links = [unescape(link) for link in re.findall(r'href="(/[^"#]*)', reader.get("/?data_set=000001").text)]
    asked = [f"/?text={EVIL}&problem={EVIL}&verdict={EVIL}", f"/group?problem={EVIL}", f"/{EVIL}"]
    for address in {*links, *asked, f"/trajectory?id={EVIL}"}:
        page = reader.get(address)
        assert page.status_code in (200, 400, 404), address
        assert not re.search(r'<script|\u202e|(href|src)="(?!/|#|data:,")', page.text)
    evil = reader.get("/trajectory", params={"id": f"evil/{HOSTILE}/?&#"}).text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&#39;&#34;{{ 7 * 7 }} ⟨U+202E⟩ltr" in evil


def test_long_texts_are_cut(reader: TestClient) -> None:
    """A text of a million characters is cut, and many tokens are shown in parts."""
    assert len(reader.get("/trajectory?id=long").text) < 300_000
    part = reader.get("/trajectory?id=many&part=3").text
    assert part.count('<span class="token" title') == 500
    assert "part 3 of 3, 4,500 tokens" in text(part)


def test_pages_forbid_scripts(reader: TestClient) -> None:
    """Each page, also of errors, forbids scripts. Other hosts are refused."""
    styles = ("/static/missing.min.css", "/static/style.css", "/static/reader.css")
    for address in ("/", "/trajectory?id=0/7/1", GROUP, "/?turn=x", "/nothing", *styles):
        headers = reader.get(address).headers
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert "script-src" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    for host in ("evil.example", "127.0.0.1.evil.example:8000", ""):
        assert reader.get("/", headers={"host": host}).status_code == 400
    assert reader.get("/", headers={"host": "[::1]:8000"}).status_code == 200


@pytest.mark.parametrize(
    ("address", "status", "says"),
    [
        ("/trajectory?id=nobody", 404, "There is no trajectory 'nobody'"),
        ("/group?data_set=x&problem=y", 404, "There is no problem 'y'"),
        ("/?least=abc", 400, "Reward from: Input should be a valid number"),
        ("/?least=1&most=0.5", 200, "No trajectory matches this filter"),
        (f"/?text={'x' * 1001}", 400, "at most 1000 characters"),
    ],
)
def test_pages_that_do_not_exist_name_the_reason(reader: TestClient, address: str, status: int, says: str) -> None:
    page = reader.get(address)
    assert page.status_code == status
    assert says in text(page.text)


def test_no_trajectories_are_no_error(store: Store, tmp_path: Path) -> None:
    """An empty data set has a page; a store without trajectories is refused before the reader starts."""
    with pytest.raises(ValueError, match="there are no trajectories"):
        _read(store, Namespace(targets=[], since="", port=0, cache=str(tmp_path)))
    commit(store, PLAIN, ([], []), [])
    with opened(store, tmp_path) as reader:
        assert "There are no trajectories here" in reader.get("/").text


def test_a_turn_shows_what_it_earned_and_for_what(store: Store, tmp_path: Path) -> None:
    """The score's reward with its parts, the environment's if that differs, and calls of tools as no wrong answers."""
    rows, scores = sums(PLAIN, 1)
    scores[0] = replace(scores[0], reward=1.25, parts={"<right>": 1.0, "format": 0.25})
    scores[1] = replace(scores[1], verdict="none", success=0.0)
    commit(store, PLAIN, (rows, scores), [])
    with opened(store, tmp_path) as reader:
        page = reader.get("/trajectory?id=0/0/0").text
        assert "reward 1.25 (<right> 1, format 0.25), 0 from the environment, 2 tokens" in text(page)
        assert "<right>" not in page
        assert "answers nothing, not graded" in text(reader.get("/trajectory?id=0/0/1").text)
        assert ids(reader.get("/?least=1.2").text) == ["0/0/0"]
        assert "0/0/1" not in ids(reader.get("/?verdict=disagree&turn=first").text)
        assert reader.get("/trajectory?id=0/0/1&colour=advantage").status_code == 200


DATA_SET, SCORES = layout.trajectories("shared", PLAIN), layout.scores("shared", PLAIN, "5c0e")


@pytest.mark.parametrize(
    ("version", "change"),
    [(DATA_SET, {"config": {"rollout": {"max_head_offpolicyness": "many"}}}), (SCORES, {"metrics": "DEEP"})],
)
def test_one_bad_manifest_leaves_the_rest_to_be_read(
    version: str, change: dict[str, Any], store: Store, tmp_path: Path
) -> None:
    """The reader shows all readable data, and names unreadable data."""
    for iteration in (PLAIN, NORMALISED):
        commit(store, iteration, sums(iteration, 2), [])
    path = Path(store.root) / layout.manifest(version)
    values = unseal(path.read_bytes(), "") | change
    path.write_bytes(seal(values).replace(b'"DEEP"', b"[" * 50_000))
    with opened(store, tmp_path) as client:
        listing, other, same = (client.get(each) for each in ("/", "/trajectory?id=2/0/0", "/trajectory?id=0/0/0"))
    assert (listing.status_code, other.status_code) == (200, 200)
    assert f"{8 if version == DATA_SET else 16} trajectories in" in text(listing.text)
    assert same.status_code == (404 if version == DATA_SET else 200)
    assert f"Not shown: {version}/manifest.json" in text(listing.text)


def test_only_who_has_the_key_can_read(store: Store, tmp_path: Path) -> None:
    """The address with the key gets a cookie for the other pages; nothing is shown without either."""
    commit(store, PLAIN, sums(PLAIN, 1), [])
    with opened(store, tmp_path) as client:
        key = require_key(client.app, 8600)  # type: ignore[arg-type]
        for stranger in ("/", "/?key=x", "/static/style.css", "/trajectory?id=0/0/0"):
            assert client.get(stranger).status_code == 403
        assert "4 trajectories" in text(client.get(f"/?key={key}").text)
        assert client.get("/trajectory?id=0/0/0").status_code == 200


def test_calls_are_shown_under_their_turn(reader: TestClient) -> None:
    """Name, arguments, output and status; a long one is folded, and a hostile one is only text."""
    html = reader.get("/trajectory?id=called").text
    page = text(html[html.index("<h2") :])
    parts = ["Turn 1", "not graded", "Call of calculator answered", "Call of search failed", "error: no such page"]
    positions = [page.index(part) for part in [*parts, "Turn 2", "Call of no tool unparsable", "Tokens"]]
    assert positions == sorted(positions)
    assert "Feedback" not in page, "the outputs are the whole feedback"
    assert "reward 0.25 (format 0.25), 0 from the environment" in page
    assert re.search(r"<details><summary>Arguments, 1,500 characters: <code>line …</code></summary>", html)
    assert EVIL not in html
    assert "Gold" not in page[page.index("Turn 1") : page.index("Turn 2")]


def test_branches_are_named(reader: TestClient) -> None:
    """The page says which turn a turn follows, and where the tokens of another sequence begin."""
    page = text(reader.get("/trajectory?id=branched").text)
    for words in ("Turn 3 follows turn 1", "Turn 4 begins another conversation", "After turn 2, sequence 1 of 3"):
        assert words in page
    plain = text(reader.get("/trajectory?id=plain").text)
    assert not re.search("sequence|follows turn|Call of|not graded", plain)


def test_lists_and_groups_show_calls(reader: TestClient) -> None:
    """A filter finds calls, a line says how many it has, and a group shows its episodes side by side, with links."""
    found = {"some": ["called"], "failed": ["called"], "unanswered": [], "none": ["branched", "plain"]}
    pages = {query: reader.get(f"/?calls={query}&data_set=000004").text for query in found}
    assert {query: sorted(ids(page)) for query, page in pages.items()} == found
    assert "3 calls" in text(pages["some"])
    page = text(reader.get("/group?data_set=runs/shared/trajectories/000004&problem=called").text)
    assert all(words in page for words in ("answers nothing", "Call of search failed"))
    page = reader.get(GROUP).text
    assert page.count("<article") == 4
    assert all(f"/trajectory?id=0%2F7%2F{sample}&amp;" in page for sample in range(4))
