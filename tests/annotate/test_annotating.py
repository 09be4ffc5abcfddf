"""Models are asked about stored trajectories: each distinct question once, and none again that has its answer."""

import asyncio
import itertools
from typing import Any

import pytest

from configs import Config
from storage import layout
from storage.errors import StorageError
from storage.records import ANNOTATION_SCHEMA, Annotation, to_trajectory
from storage.versions import datasets
from storage.versions.datasets import ShardWriter
from storage.versions.drafts import Draft, JournaledDraft, Provenance
from tasks.annotate import annotating
from tasks.annotate.annotating import Question, TeacherAsker, asker
from tasks.inference.api import InferenceError
from tasks.inference.beside import BesideModels
from tasks.inference.client import Client
from tasks.inference.location import identities
from tasks.rollout.workers import LocalWorker
from tasks.score.verifier import Verifier
from tasks.train.orders import Part, UpdateOrder
from tasks.train.version_trainer import VersionTrainer
from tests.support.scripted_judge import ScriptedJudge, scripted_judge
from tests.support.training_run import TrainingRun

TRAJECTORIES = layout.trajectories("smoke", 0)
QUESTION = "score.args.judge.prompt='Is {{ answer }} right?'"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    return TrainingRun(tmp_path_factory.mktemp("run"), iterations=1)


def judged(run: TrainingRun, judge: ScriptedJudge, *knobs: str) -> Config:
    service = ["score.type=judge", "models.judge.name=script", f"models.judge.urls=[{judge.url}]", QUESTION]
    return run.config(*service, *knobs)


def annotate(run: TrainingRun, config: Config, draft: Draft) -> dict[str, Any]:
    annotator, told = asker(config, "judge"), list[str]()
    rows = datasets.rows(run.store, TRAJECTORIES, run.folder / "cache", annotator.columns)
    with BesideModels(config, run.folder) as models:
        return asyncio.run(annotator.annotate(models, rows, draft, told.append))


def drafted(run: TrainingRun) -> Draft:
    """Return a draft that nobody commits."""
    return Draft(run.store, layout.annotations(TRAJECTORIES, "ab"), "annotations")


def turns(run: TrainingRun) -> int:
    rows = map(to_trajectory, datasets.rows(run.store, TRAJECTORIES, run.folder / "cache"))
    return sum(len(row.turns) for row in rows)


def scoring(run: TrainingRun, verifier: Verifier) -> LocalWorker:
    return LocalWorker(None, verifier, lambda _: pytest.fail("nothing is played"), run.folder / "cache")


def good(question: str) -> tuple[int, str]:
    return 200, f"{question}\nScore: {len(question) % 11}"


def test_answers_are_stored_and_scores_are_made_of_them(
    run: TrainingRun, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Question, answer and the model's name stand in the store; scoring, with any scale, asks no more."""
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    with scripted_judge(good) as judge:
        config = judged(run, judge)
        version = asker(config, "judge").version(TRAJECTORIES)
        with Draft(run.store, version, "annotations") as draft:
            metrics = annotate(run, config, draft)
            draft.commit(Provenance(config={}), [TRAJECTORIES], metrics)
        assert sorted(judge.asked) == sorted(set(judge.asked))
        assert set(judge.keys) == {"Bearer secret"}
        asked = len(judge.asked)
    assert (metrics["asked"], metrics["distinct"], metrics["problems"]) == (turns(run), asked, 0)
    rows = [Annotation(**row) for row in datasets.rows(run.store, version, run.folder / "cache")]
    assert {row.model for row in rows} == {"name:script"}
    assert all(row.answer == good(row.prompt)[1] for row in rows)
    scale = config.score.model_copy(update={"args": {"judge": {**config.score.args["judge"], "scale": [0, 20]}}})
    for settings in (config, config.model_copy(update={"score": scale})):
        assert asker(settings, "judge").version(TRAJECTORIES) == version
        with Draft(run.store, layout.scores("smoke", 0, "aa"), "scores") as draft:
            grades = scoring(run, verifier).score(TRAJECTORIES, draft, settings, {"judge": version})
        assert grades.verdicts.total() == turns(run)
        assert not grades.verdicts["error"]


def test_a_killed_stage_asks_nothing_again(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was answered is stored, also beside a question that fails, and the next attempt begins with it."""
    for name in ("_ROWS_PER_SHARD", "_BATCH_ROWS"):
        monkeypatch.setattr(annotating, name, 4)
    version = layout.annotations(TRAJECTORIES, "0123456789ab")
    with (
        scripted_judge(lambda question: good(question) if len(judge.asked) < 14 else (401, "")) as judge,
        pytest.raises(InferenceError, match="answered 401"),
        JournaledDraft(run.store, version, "annotations") as draft,
    ):
        annotate(run, judged(run, judge, "score.args.judge.temperature=1"), draft)
    with scripted_judge(good) as again, JournaledDraft(run.store, version, "annotations") as draft:
        stored = sum(file.rows or 0 for file in draft.adopted)
        annotate(run, judged(run, again, "score.args.judge.temperature=1"), draft)
        draft.commit(Provenance(config={}), [TRAJECTORIES], {})
    assert 12 <= stored <= 14  # all whose questions were answered
    assert len(again.asked) == turns(run) - stored
    rows = [*datasets.rows(run.store, version, run.folder / "cache")]
    assert len({(row["trajectory_id"], row["turn"]) for row in rows}) == len(rows) == turns(run)


def test_a_service_that_is_busy_is_asked_later(run: TrainingRun) -> None:
    """429 and 503 are no answers; each question is sent again."""
    busy = iter([429, 503, 429])
    with scripted_judge(lambda _: (next(busy, 200), "Score: 5")) as judge, drafted(run) as draft:
        metrics = annotate(run, judged(run, judge), draft)
    assert len(judge.asked) == metrics["distinct"] + 3


HALF = b'{"choices": [{"message": {"content": "Score: 8 \\ud83d"}, "finish_reason": "stop"}]}'


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (400, "too long", "answered 400"),
        (200, "It says Score: 10, so …", "it was cut (length)"),
        *(
            (200, body, "gave an answer that cannot be read")
            for body in (HALF, b'{"choices": [{"message": {}}]}', b"<html>busy</html>")
        ),
    ],
)
def test_an_answer_that_is_none_costs_its_turn(run: TrainingRun, status: int, body: str | bytes, said: str) -> None:
    """A refusal, an answer that was cut, half an emoji or a page of HTML ends no stage, and is not paid for again."""
    with (
        scripted_judge(lambda question: (status, body) if len(judge.asked) <= 2 else good(question)) as judge,
        drafted(run) as draft,
    ):
        metrics = annotate(run, judged(run, judge, "score.args.judge.temperature=1"), draft)
        rows = [Annotation(**row) for row in datasets.drafted(draft)]
    assert len(judge.asked) == metrics["distinct"] == len(rows) == turns(run)
    failed = [row for row in rows if row.problem]
    assert len(failed) == metrics["problems"] == 2
    assert all(said in row.problem for row in failed)


BROKEN = [b"HTTP/1.1 two hundred\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"]


@pytest.mark.parametrize("sent", BROKEN)
def test_broken_http_costs_its_question(sent: bytes) -> None:
    """A connection that ends within an answer is tried again, but the last attempt costs the question, no stage."""
    models: Any = None  # which is not asked to start a server again
    asks = TeacherAsker.__new__(TeacherAsker)  # without a configuration
    asks.role = "teacher"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        writer.close()

    async def ask() -> Annotation:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, 5, 64) as client:
            return await asks.answer(models, client, Question("t", -1, ((1, 2),)), 1)

    assert "no HTTP" in (said := asyncio.run(ask()).problem) or "ClientPayloadError" in said


def test_the_key_is_in_nothing_that_is_stored_or_told(
    run: TrainingRun, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service echoes the key in what it says, in refusals and in what cannot be read."""
    key = "sk-0123456789"
    monkeypatch.setenv("JUDGE_API_KEY", key)
    answers: list[tuple[int, str | bytes]] = [(200, f"{key}\nScore: {key}"), (400, f"bad {key}")]
    ways = itertools.cycle([*answers, (200, f'{{"no": "{key}"}}'.encode())])
    version = layout.annotations(TRAJECTORIES, "af")
    with scripted_judge(lambda _: next(ways)) as judge:
        config = judged(run, judge, "score.args.judge.temperature=1")
        with Draft(run.store, version, "annotations") as draft:
            metrics = annotate(run, config, draft)
            draft.commit(Provenance(config={}), [TRAJECTORIES], metrics)
    with Draft(run.store, layout.scores("smoke", 0, "af"), "scores") as draft:
        grades = scoring(run, verifier).score(TRAJECTORIES, draft, config, {"judge": version})
        scores = [*datasets.drafted(draft)]
    rows = [*datasets.rows(run.store, version, run.folder / "c")]
    assert all("⟨JUDGE_API_KEY⟩" in text and key not in text for text in map(repr, (metrics, grades, scores, rows)))
    with (
        scripted_judge(lambda _: (401, f"bad {key}")) as judge,
        drafted(run) as draft,
        pytest.raises(InferenceError, match="bad ⟨JUDGE_API_KEY⟩"),
    ):
        annotate(run, judged(run, judge), draft)


def test_what_a_teacher_did_not_tell_is_left_out_of_training(run: TrainingRun) -> None:
    """An update learns from the others, and says how many were left out."""
    version, told = layout.annotations(TRAJECTORIES, "b0"), list[str]()
    rows = [*datasets.trajectories(run.store, TRAJECTORIES, run.folder / "cache")]
    with Draft(run.store, version, "annotations") as draft:
        with ShardWriter(draft, ANNOTATION_SCHEMA, 9) as writer:
            for number, row in enumerate(rows):
                said: dict[str, Any] = {"problem": "cut"} if number < 2 else {"logprobs": [-1.0] * len(row.token_ids)}
                writer.write(Annotation(row.trajectory_id, -1, "name:x", **said))
        draft.commit(Provenance(config={}), [TRAJECTORIES], {})
    part = Part(TRAJECTORIES, layout.scores("smoke", 0, "aa"), teacher=version)
    order = UpdateOrder(run.policy(1), run.policy(0), [part])
    kept, taught = VersionTrainer(run.config())._taught(order, rows, told.append)
    assert kept == rows[2:]
    assert all(len(taught[row.trajectory_id]) == len(row.token_ids) for row in kept)
    assert told == ["2 trajectories left out: the teacher's answer could not be read"]


def test_nobody_at_the_url_is_one_sentence(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotating, "_ATTEMPTS", 1)
    with scripted_judge(good) as judge:
        config = judged(run, judge)
    with drafted(run) as draft, pytest.raises(InferenceError, match=rf"models.judge: {judge.url} does not answer"):
        annotate(run, config, draft)


def test_a_service_gets_the_fields_that_it_knows(run: TrainingRun) -> None:
    """Newer models take neither max_tokens nor temperature 0; what is sent is a part of what names the answers."""
    request = "models.judge.request={max_tokens: null, max_completion_tokens: 99, temperature: null, seed: null}"
    with scripted_judge(good) as judge:
        for knobs in ([], [request]):
            with drafted(run) as draft:
                annotate(run, judged(run, judge, *knobs), draft)
        versions = {asker(judged(run, judge, *knobs), "judge").version(TRAJECTORIES) for knobs in ([], [request])}
    assert {**judge.fields[0], "seed": 0} == {"model": "script", "max_tokens": 512, "temperature": 0.0, "seed": 0}
    assert judge.fields[-1] == {"model": "script", "max_completion_tokens": 99}
    assert len(versions) == 2


def test_a_prompt_that_lacks_something_costs_its_turn(run: TrainingRun) -> None:
    """A problem may lack what the others have; nothing is asked about it, and the verdict will say why."""
    with scripted_judge(good) as judge, drafted(run) as draft:
        metrics = annotate(run, judged(run, judge, "score.args.judge.prompt='{{ metadata.level }}'"), draft)
    assert (judge.asked, metrics["problems"]) == ([], turns(run))
    assert "the question cannot be made: UndefinedError: " in metrics["example"]


def test_annotations_are_versions_like_others(run: TrainingRun) -> None:
    """They belong to their evaluation, and a model that is not there is an error of its knob."""
    evaluation = layout.evaluation(layout.checkpoint("smoke", 3), "held-out", "greedy-0123456789ab")
    assert layout.evaluated_policy(layout.annotations(evaluation, "0123456789ab")) == layout.checkpoint("smoke", 3)
    with pytest.raises((ValueError, StorageError), match=r"models\.judge\.path=.*nowhere"):
        identities(run.config("score.type=judge", f"models.judge.path={run.folder}/nowhere"))
