"""Make a store with today's code, to be kept with the stores of earlier versions:

    python -m tests.kept_stores.make 2026-11

writes `tests/kept_stores/2026-11.tar.gz` in about four minutes. `tests/flows/test_kept_stores.py` reads, verifies,
audits and forks every kept store. A store holds

    runs/half           one whole iteration, and rollout and scores of a second one; killed before the second update
    runs/killed         a rollout with two shards in its journal and no manifest; killed during the rollout
    runs/adapter        like `half`, but an adapter is trained (2027-02 only)
    runs/taught         like `half`, but an adapter learns from a served teacher, on a mixture (from 2027-03 on)
    retraining/nightly  a night that promoted its policy, and a night that was killed during training
    aliases/champion    the alias with two moves
    audits/…            an audit of `half`

All policies are the smallest that vLLM serves, to keep the repository small.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from pkgutil import resolve_name

from tests.experiments.teach import DIGITS, Lesson, WarmStart, make_policy
from tests.support.killed_flow import Point, send_at

FOLDER = Path(__file__).parent
LARGEST = 1_200_000
"""Upper limit of a store's size in bytes, because every clone of the repository holds it."""
OVERRIDES = [
    "problems.held_out={kind: arithmetic, split: held-out, low: 0, high: 9, count: 4}",
    "rollout.rows_per_shard=4",
    "score.workers=1",
    "agent={type: openai, args: {arguments: {num_turns: 2}}}",
]
TAUGHT = [
    "algorithm.type=opd",
    "train.state_every=2",
    "models.teacher.max_model_len=256",
    "models.teacher.enforce_eager=true",
    "problems.train=[{name: sums, source: {kind: arithmetic, high: 9}}, "
    "{name: more, weight: 2, source: {kind: arithmetic, low: 10, high: 20}}]",
]
EASY = "retrain.gate={least_gain: -1, margin: 1, max_kl: 1000, max_length_ratio: 1000, max_truncated_gain: 1}"
UPDATE = "tasks.train.trainer:Trainer.update"
SHARD = "storage.versions.drafts:JournaledDraft.add_shard"
KILLED = -signal.SIGKILL


def main() -> None:
    name = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="kept-store-") as folder:
        os.environ |= {"PREFECT_HOME": f"{folder}/prefect", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
        root = Path(folder) / "store"
        make(root, Path(folder))
        target = FOLDER / f"{name}.tar.gz"
        with tarfile.open(target, "x:gz") as archive:
            archive.add(root, "store")
    size = target.stat().st_size
    print(f"{target}: {size:,} bytes")
    if size > LARGEST:
        raise SystemExit(f"{target} has more than {LARGEST:,} bytes: leave something out")


def make(root: Path, folder: Path) -> None:
    """Fill the store at `root`; `folder` holds the cache and the incoming problems."""
    make_policy(WarmStart(hidden_size=32, layers=1, steps=300), [Lesson(DIGITS)], 1, folder / "policy")
    policy = f"policy={{path: {folder}/policy}}"
    place = [*OVERRIDES, policy, f"storage.root={root}", f"storage.cache={folder}/cache"]
    train = "flows.math_mt_ppo:math_mt_ppo"
    _run(train, [*place, "run.name=half"], Point("train", UPDATE, 2))
    weights = f"{root}/runs/half/checkpoints/000000"
    first = f"policy={{path: {weights}}}"
    adapted = f"policy={{path: {weights}, lora: {{rank: 2, alpha: 4}}}}"
    taught = [*TAUGHT, adapted, f"models.teacher.path={weights}"]
    _run(train, [*place, "run.name=taught", *taught], Point("train", UPDATE, 2))
    shards = 1 + 2  # one shard of the evaluation and two of the rollout
    _run(train, [*place, "run.name=killed", first], Point("rollout", SHARD, shards, "after"))

    incoming = folder / "incoming"
    incoming.mkdir()
    fields = "fields: {prompt: prompt, solutions: answer}"
    source = f"problems.train={{kind: jsonl, path: '{incoming}/*.jsonl', {fields}}}"
    night = [*place, "run.name=nightly", "run.iterations=1", "evaluation.every=1000", first, source, EASY]
    _arrive(incoming / "a.jsonl", range(8))
    _run("flows.retrain:retrain", night)
    _arrive(incoming / "b.jsonl", range(8, 16))
    _run("flows.retrain:retrain", night, Point("train", UPDATE))

    audit = [sys.executable, "-m", "flows.audit_trajectories", "--config", "smoke", "--fail-on", "never", "half"]
    subprocess.run([*audit, *place], check=True)


def _arrive(file: Path, numbers: range) -> None:
    lines = [json.dumps({"prompt": f"What is {n} + 50?", "answer": n + 50}) for n in numbers]
    file.write_text("\n".join(lines) + "\n")


def _run(flow: str, overrides: list[str], point: Point | None = None) -> None:
    """Run a flow in a new process, to its end or until it is killed at `point`."""
    process = multiprocessing.get_context("spawn").Process(target=_flow, args=(flow, overrides, point))
    process.start()
    process.join()
    if process.exitcode != (KILLED if point else 0):
        raise RuntimeError(f"{flow} ended with {process.exitcode}")


def _flow(flow: str, overrides: list[str], point: Point | None) -> None:
    from flows.launch.temporary_server import temporary_server

    if point:
        send_at(point)
    with temporary_server():
        resolve_name(flow)("smoke", overrides)


if __name__ == "__main__":
    main()
