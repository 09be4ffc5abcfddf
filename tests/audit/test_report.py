"""The audit's report: data stay text, every number has a link to its cases, and the page needs no request."""

import base64
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

from markdown_it import MarkdownIt

from storage.records import Call
from tasks.audit.database import Conversation
from tasks.audit.report import wording
from tasks.audit.report.page import render
from tasks.audit.report.plots import plots
from tasks.audit.report.wording import check_rows, summary
from tasks.audit.results import AuditResult, CheckResult, Histogram, Level, SetNumbers, worst
from tasks.tables.sets import Case

EVIL = "demo/\"3'</script><script>alert(2)</script><img src=x onerror=alert(3)>/[a](javascript:b)/`c`/0"
SHOWN = [
    "<script>alert(1)</script>",
    "[a](javascript:alert(1))",
    "<img src=x>",
    r"\frac{1}{2} $x^2$",
    "{{ 7 * 7 }}",
]
COMMAND = "python -m somewhere read audits/1 --root 's3://bucket'"


def check(name: str, verdict: Level = "pass", **others: Any) -> CheckResult:
    value, of = (None, 0) if verdict == "skipped" else (0.0, 512)
    rest: dict[str, Any] = {"value": value, "threshold": 0.0, "cases": 0, "of": of, "unit": "turn"}
    return CheckResult(name, "What it means.", verdict, "warn", **{**rest, "says": f"says {name}", **others})


SET = "runs/demo/trajectories/000000"


def case(id_: str, detail: str = "turn 1: wrong", data_set: str = SET) -> Case:
    return Case("turn", id_, data_set, detail)


def numbers(iteration: int = 0, run: str = "demo", **others: Any) -> SetNumbers:
    version, success = f"runs/{run}/trajectories/{iteration:06d}", [0.5 + iteration / 1000, 0.3]
    shares = 0.6, 0.3, None, 5.9, 0.0, 0.0, 0.001, 0.1, 0.0, -0.17  # any turn, fixed, broken, tokens of an answer …
    return replace(SetNumbers(version, run, iteration, 512, 1000, 6000, [*success], *shares), **others)


def result(checks: list[CheckResult], sets: list[SetNumbers], histograms: list[Histogram] | None = None) -> AuditResult:
    verdict = worst([result.verdict for result in checks])
    return AuditResult("s3://bucket/prefix", verdict, checks, sets, histograms or [], {"tables": 1.25})


def conversation(id_: str, *texts: str, feedback: str = "", calls: Sequence[Call] = ()) -> Conversation:
    known: dict[str, Any] = {"verdict": "wrong", "environment_verdict": "wrong", "verdict_reason": ""}
    known |= {"finish_reason": "stop", "reward": 0.0, "earned": 0.0, "parts": None, "tokens": 7, "graded": True}
    known |= {"beyond_calls": feedback, "calls": ()}
    of_turns = [{"turn": n, "follows": n - 1, "text": text, "given": text} for n, text in enumerate(texts)]
    turns = [known | turn | {"extracted": text[:20]} for turn, text in zip(of_turns, texts, strict=True)]
    turns[0] |= {"calls": calls, "beyond_calls": "" if [feedback] == [call.output for call in calls] else feedback}
    row: Conversation = {"row": 0, "trajectory_id": id_, "data_set": SET, "problem_id": EVIL, "sample": 0}
    row |= {"status": "completed", "reason": "", "policy_version": 0, "solutions": ["19", EVIL]}
    return row | {"prompt": f"What is 12 + 7? {texts[0]}", "turns": turns}


PICTURE = "data:image/svg+xml;base64,"


class Page(HTMLParser):
    """Tags, attributes and text of a page, as a browser parses them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: dict[str, list[str]] = defaultdict(list)
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            self.attributes[name].append(value or "")
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data


def test_hostile_text_stays_text() -> None:
    """Scripts, links, LaTeX and templates in all fields from data are shown; none becomes a tag."""
    cases = [case(EVIL, text) for text in SHOWN]
    checks = [check("loops", "fail", value=5.0, cases=9, says=SHOWN[0], examples=cases)]
    checks += [check("failed", "skipped", says=EVIL)]
    sets = [numbers(0), numbers(1, run=EVIL), numbers(2, run="$x_1$")]
    audited = result(checks, sets, [Histogram(SHOWN[0], SHOWN[2], [0.0, 1.0, 2.0], [3, 4])])
    conversations = {(SET, EVIL): conversation(EVIL, *SHOWN, feedback=SHOWN[0])}
    page = Page(render(audited, conversations, COMMAND))
    for text in (*SHOWN, EVIL):
        assert text in page.text
    assert page.tags["script"] == 2
    assert page.tags["img"] == len([src for src in page.attributes["src"] if src.startswith(PICTURE)])
    assert not [name for name in page.attributes if name.startswith("on")]
    assert not [value for value in page.attributes["href"] if not value.startswith(("#", "data:"))]


def test_hidden_characters_are_spelled_out() -> None:
    """Characters that reorder, hide or colour text occur nowhere in the page, plots included."""
    sly = "a\u202eb\u200bc\x1b[31m\ud800"
    checks = [check("loops", "warn", cases=1, examples=[case(sly, sly, sly)], says=sly)]
    html = render(result(checks, [numbers(0, run=sly), numbers(1)]), {(sly, sly): conversation(sly, sly)}, COMMAND)
    assert not set(sly) & set("\u202e\u200b\x1b\ud800") & set(html)
    assert "a⟨U+202E⟩b⟨U+200B⟩c⟨U+001B⟩[31m" in html
    html.encode()


def test_nothing_is_loaded_and_no_other_script_runs() -> None:
    """The page has no address except its store's; its policy allows only its two scripts, by hash."""
    html = render(result([check("loops")], [numbers(0), numbers(1)]), {}, COMMAND)
    page = Page(html)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts]
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    allowed = f"style-src 'unsafe-inline'; img-src data:; script-src {scripts}; base-uri 'none'; form-action 'none'"
    assert page.attributes["content"][0] == f"default-src 'none'; {allowed}"
    without_namespaces = re.sub(r' xmlns="[^"]*"', "", html)  # of pictures in a style sheet; nothing loads them
    assert set(re.findall(r"\w+://", without_namespaces)) == {"s3://"}  # the address of the store
    assert all(src.startswith(PICTURE) for src in page.attributes["src"])
    assert "@import" not in html
    assert not re.search(r"url\((?!#|'data:)", html)


def test_every_number_of_cases_leads_to_them() -> None:
    """For every verdict counts link to the check's section, links have targets, and ids are unique."""
    verdicts: list[Level] = ["pass", "warn", "fail", "skipped"]
    examples = [case("demo/0"), case("demo/1", data_set="")]
    checks = [check(f"check_{verdict}", verdict, cases=1234, examples=examples) for verdict in verdicts]
    html = render(result(checks, [numbers(0), numbers(1)]), {(SET, "demo/0"): conversation("demo/0", "19")}, COMMAND)
    page = Page(html)
    ids = page.attributes["id"]
    assert len(ids) == len(set(ids))
    targets = {value[1:] for value in page.attributes["href"] if value.startswith("#")}
    assert targets <= set(ids)
    for verdict in verdicts:
        assert {f"check-check_{verdict}", f"examples-check_{verdict}"} <= targets
        assert f'<a href="#check-check_{verdict}">1,234</a>' in html
    assert "The first 2 cases of 1,234" in page.text
    assert f'href="#set-0">{numbers().version}' in html
    assert COMMAND in page.text


def test_missing_values_are_dashes_and_sort_last() -> None:
    """None is never shown as text, also where a plot is missing; infinity and NaN break nothing.

    An audit of skipped checks says that no check ran, and why.
    """
    sets = [numbers(0, success=[None], any_turn=None), numbers(1, logprob=math.nan, staleness=math.inf)]
    skipped = result([check("loops", "skipped", says="there is no row")], sets)
    page = Page(html := render(skipped, {}, COMMAND))
    for words in ("SKIPPED: 1 check skipped", "No check could run", "there is no row"):
        assert words in page.text
    assert "None" not in page.text
    for key, shown in (("", wording.MISSING), ("Infinity", "inf"), ("", "nan"), ("0.501", "50.1%")):
        assert f'<td class="num" data-sort="{key}">{shown}</td>' in html


def test_plots_are_pictures_of_their_own() -> None:
    """A plot keeps text as text, names the runs, and is the same each time."""
    sets = [numbers(n, run=run, drift=1e-5) for run in ("demo", "other $x$") for n in range(3)]
    sets += [replace(numbers(5), version="runs/demo/evaluations/000005/held-out/greedy-ab12")]
    histograms = [Histogram("Length", "tokens", [1.0, 2.0, 3.0], [4, 2]), Histogram("None", "", [0.0, 1.0], [0])]
    drawn = plots(sets, histograms)
    assert drawn == plots(sets, histograms[:1])
    assert [plot.title for plot in plots(sets[:1], histograms)] == ["Length"], "lines need two data sets"
    pictures = [base64.b64decode(plot.image.removeprefix(PICTURE)).decode() for plot in drawn]
    assert [ElementTree.fromstring(picture).tag for picture in pictures] == ["{http://www.w3.org/2000/svg}svg"] * 10
    assert {"other $x$</text>", "demo: held-out</text>"} <= set(re.findall(r"[^<>]*</text>", pictures[0]))


def test_long_texts_show_beginning_and_end() -> None:
    """A megabyte without a break does not make the page long, and the answer at its end stays visible."""
    text = "begin" + "A" * 1_000_000 + r"\boxed{42}"
    checks = [check("loops", "warn", cases=1, examples=[case("demo/0", text)])]
    page = Page(html := render(result(checks, [numbers()]), {(SET, "demo/0"): conversation("demo/0", text)}, COMMAND))
    assert len(re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)) < 50_000
    assert re.search(r"beginA+\n… [\d,]+ characters left out …\nA+\\boxed\{42}", page.text)


def test_calls_and_branches_are_shown_only_if_there_are_any() -> None:
    """A table by tool and status, columns and a plot over iterations; without calls the page has none of them."""
    calls = [{"tool": {"answered": 3, "failed": 1}, EVIL: {"unparsable": 9}}, {"tool": {"answered": 1}}, {}]
    sets = [numbers(n, calls=each, with_calls=n / 10, branched=0.5) for n, each in enumerate(calls)]
    assert [each.failed_calls for each in sets] == [0.25, 0.0, None]
    page = Page(html := render(result([check("loops")], sets), {}, COMMAND))
    rows = re.findall(r'<td role="rowheader" class="tight id">.*?</tr>', html[html.index('id="tools"') :], re.DOTALL)
    assert ["".join(re.findall(r'data-sort="(\d+)"', row)) for row in rows] == ["90009", "54100"]
    assert EVIL in page.text
    assert page.tags["script"] == 2
    words = ("Calls of tools", "Share of episodes with calls", "failed calls", "episodes with branches")
    assert all(word in html for word in words)
    without = render(result([check("loops")], [numbers(0), numbers(1)]), {}, COMMAND)
    assert not any(word in without for word in words)


def test_the_calls_of_a_case_are_shown() -> None:
    """A conversation in the report has its calls with their outputs, escaped, and the feedback beyond these."""
    calls = [Call(0, "c", EVIL, SHOWN[0], SHOWN[1], "failed")]
    checks = [check("loops", "warn", cases=1, examples=[case("demo/0")])]
    for feedback in SHOWN[1:3]:
        shown = conversation("demo/0", "19", "20", feedback=feedback, calls=calls)
        shown["turns"][1] |= {"follows": -1, "graded": False}
        page = Page(render(result(checks, [numbers(0)]), {(SET, "demo/0"): shown}, COMMAND))
        words = " ".join(page.text.split())
        assert f"Call of {EVIL} failed Arguments {SHOWN[0]} Output {SHOWN[1]}" in words
        assert f"Feedback {feedback}" in words
        assert words.count("Feedback") == (1 if feedback == SHOWN[1] else 2)
        assert "Turn 2 begins another conversation answers nothing" in words


def test_the_summary_interprets_nothing() -> None:
    """The summary shows the same text as Markdown, without a tag, link or image that comes from data."""
    tricky = "1. # [a](javascript:b) ![i](x) <b>bold</b> *em* `x` | &amp; <https://e.example> www.e.example a@e.example"
    checks = [check("loops", "fail", value=2.0, cases=2, says=tricky, examples=[case(EVIL)])]
    checks += [check("failed", "skipped", says=tricky)]
    text = summary(replace(result(checks, []), store="x`](javascript:y)` <i>"))
    page = Page(MarkdownIt("commonmark").render(text))
    assert set(page.tags) == {"h1", "p", "ul", "li", "strong"}
    assert page.text.count(tricky) == 1
    assert not re.search(r"(?<!`)https?://|www\.e|(?<!\\)@", text)


def test_rows_of_checks() -> None:
    """Alarms come first, cells are one line of plain text, and skipped checks have dashes; the headline counts.

    Shares are never rounded to 0 % or 100 %; values have their check's unit.
    """
    checks = [
        check("failed", "skipped", says="no\nscores\u202e"),
        check("loops", "warn", value=0.0223, threshold=0.01, cases=5120, of=229_000, share_of=40),
        check("logprob_drift", "fail", value=0.03, threshold=0.02),
    ]
    rows = check_rows(audited := result(checks, []))
    assert wording.headline(audited) == "FAIL: 1 check fails, 1 warns, 1 skipped"
    assert [wording.share(value) for value in (0.0, 0.99996, 0.2)] == ["0%", "99.9960%", "20.0%"]
    assert [row["verdict"] for row in rows] == ["fail", "warn", "skipped"]
    assert (rows[0]["value"], rows[0]["threshold"]) == ("0.03 nats a token", "0.02 nats a token")
    assert rows[1] == {
        "verdict": "warn", "check": "loops", "value": "2.2% of 40 turns", "threshold": "1%", "cases": "5,120",
        "of": "229,000 turns", "found": "says loops",
    }  # fmt: skip
    assert rows[2]["found"] == "no scores⟨U+202E⟩"
    assert rows[2]["value"] == rows[2]["cases"] == rows[2]["of"] == wording.MISSING
