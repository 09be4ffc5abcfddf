"""Keys of all objects under the root. A version is a folder, which exists as a version once it has a manifest.

problems/<fingerprint>                      a problem set
audits/<fingerprint>                        the findings of an audit of trajectories, and its report
exclusions/<digest of its rows>             trajectories and problems that are kept out of training
runs/<run>/run                              the run itself: its configuration
runs/<run>/checkpoints/<policy version>     weights, tokenizer, optimizer, RNG, canary
runs/<run>/trajectories/<iteration>         rolled out with the checkpoint of the same number
runs/<run>/annotations/<iteration>/<model>  what a model beside the policy said about them
runs/<run>/scores/<iteration>/<scorer>      scores of those trajectories
runs/<run>/evaluations/<policy version>/<set>/<protocol>   trajectories on a set; with `…/annotations/<model>` and
                                            `…/scores/<scorer>`
runs/<run>/history/<iterations>             the results of each problem in so many iterations, of older programs
runs/<run>/curriculum                       how often the run draws each problem, computed from earlier runs
runs/<run>/decision                         retraining: champion or challenger, and why

runs/<run>/metrics/…                        the numbers of its stages and evaluations (see `tasks.metrics`); no version
runs/<run>/report                           pictures and summary of the run; no version, replaced by the next one
runs/<run>/logs/<time>                      what the nodes of a cluster logged before a failure; no version

Within a version:
manifest.json                               the commit record
<nonce>/…                                   data objects of the attempt with that nonce
journal/<number>.json                       finished shards, with which the next writer continues a killed one
collected.json                              the tombstone: gc deleted the data; the manifest stays
collected-state.json                        gc deleted `state/` of a checkpoint, and no more
withdrawn.json                              earlier programs: the manifest of a version that had lost objects

Logs of numbered entries that are created once (see `storage.logs.log`):
catalog/<number>.json                       all attempts to commit, in order
aliases/<name>/<number>.json                moves of an alias
leases/<run>/<number>.json                  holders of the lease of a run; `beats/<number>.json` has their signs of life
leases/<version>/<nonce>/<number>.json      earlier programs: the same for an attempt that no lease of a run protects
retraining/<name>/<number>.json             nights that began and ended (see `storage.logs.nights`)
"""

import re
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

from configs.models import CHECKPOINT
from storage import version_names as names
from storage.errors import DamagedError
from storage.version_names import version_of

AREAS = ("runs", "problems", "audits", "exclusions")
"""The folders that hold all versions."""
_AREA = re.compile(rf"(?<!:/)(?<!:)/(?=({'|'.join(AREAS)})/)")
_RUN = re.compile(r"runs/[^/]+")


def check_key(key: str) -> str:
    """Return `key` if it stays inside of the root.

    Raises:
        DamagedError: `key` is empty, absolute, unprintable, holds a backslash, or climbs out of the root with `..`.
    """
    parts = PurePosixPath(key).parts
    if not parts or key.startswith("/") or ".." in parts or "\\" in key or not key.isprintable():
        raise DamagedError(f"object key {key!r} is empty, absolute, unprintable or climbs out of the root")
    return key


Key = Annotated[str, AfterValidator(check_key)]
"""A key in a record. It is checked when the record is read, because the record may come from another program."""


def split_uri(target: str) -> tuple[str | None, str]:
    """Split a URI or path into the root, None if it names no root, and the rest.

    The rest is a run or a version, whole. So a root may lie below folders that are called as ours: only where nothing
    is a run or a version, the last such folder counts.

    >>> split_uri("s3://bucket/runs/prefix/runs/demo/trajectories/000003")
    ('s3://bucket/runs/prefix', 'runs/demo/trajectories/000003')
    >>> split_uri("runs/demo"), split_uri("demo")
    ((None, 'runs/demo'), (None, 'demo'))
    """
    target = target.rstrip("/")
    splits: list[tuple[str | None, str]] = [(None, target)]
    splits += [(target[: slash.start()], target[slash.end() :]) for slash in _AREA.finditer(target)]
    return next((split for split in splits if _RUN.fullmatch(split[1]) or version_of(split[1])), splits[-1])


def find_run(target: str) -> tuple[str | None, str]:
    """Split what a user calls a run, its name or the path or URI of its folder, into the root, if any, and the name.

    >>> find_run("s3://bucket/prefix/runs/demo"), find_run("demo")
    (('s3://bucket/prefix', 'demo'), (None, 'demo'))
    """
    root, rest = split_uri(target)
    return root, rest.removeprefix("runs/").split("/")[0]


def problems(fingerprint: str) -> names.ProblemsVersion:
    return names.ProblemsVersion(f"problems/{fingerprint}")


def audit(fingerprint: str) -> names.AuditVersion:
    return names.AuditVersion(f"audits/{fingerprint}")


def exclusions(digest: str) -> names.ExclusionsVersion:
    return names.ExclusionsVersion(f"exclusions/{digest}")


def run(name: str) -> names.RunVersion:
    return names.RunVersion(f"runs/{name}/run")


def checkpoint(name: str, version: int) -> names.PolicyVersion:
    return names.PolicyVersion(f"runs/{name}/checkpoints/{version:06d}")


def checkpoint_of(text: str) -> names.PolicyVersion:
    """Return the checkpoint that `RUN@N` in a configuration names."""
    run, _, number = text.rpartition("@")
    return checkpoint(run, int(number))


def version_in(text: str) -> names.Version | None:
    """Return the version that a text of a configuration means: its name or URI, that of a file in it, or `RUN@N`.

    >>> version_in("demo@3"), version_in("s3://bucket/x/runs/demo/checkpoints/000003"), version_in("demo")
    ('runs/demo/checkpoints/000003', 'runs/demo/checkpoints/000003', None)
    """
    rest = checkpoint_of(text) if re.fullmatch(CHECKPOINT, text) else split_uri(text)[1]
    return version_of((data_of(rest) or [rest])[0])


def trajectories(name: str, iteration: int) -> names.TrajectoriesVersion:
    return names.TrajectoriesVersion(f"runs/{name}/trajectories/{iteration:06d}")


def scores(name: str, iteration: int, scorer: str) -> names.ScoresVersion:
    return names.ScoresVersion(f"runs/{name}/scores/{iteration:06d}/{scorer}")


def annotations(trajectories: names.TrajectoriesVersion, model: str) -> names.AnnotationsVersion:
    """Return the version of what a model said about trajectories; `model` says which one, and how it was asked."""
    if isinstance(trajectories, names.EvaluationVersion):
        return names.AnnotationsVersion(f"{trajectories}/annotations/{model}")
    return names.AnnotationsVersion(f"runs/{trajectories.run}/annotations/{trajectories.number:06d}/{model}")


def evaluation(policy: names.PolicyVersion, set_name: str, protocol: str) -> names.EvaluationVersion:
    """Return the version of the trajectories of `policy` on the set `set_name`; `protocol` says how it was played."""
    return names.EvaluationVersion(f"runs/{policy.run}/evaluations/{policy.rpartition('/')[2]}/{set_name}/{protocol}")


def evaluation_scores(evaluation: names.EvaluationVersion, scorer: str) -> names.ScoresVersion:
    return names.ScoresVersion(f"{evaluation}/scores/{scorer}")


def evaluated_policy(version: str) -> names.PolicyVersion | None:
    """Return the checkpoint that an evaluation, or what was said about one, is about; None for other versions."""
    known = version_of(version)
    evaluation = known.evaluation if isinstance(known, names.ScoresVersion | names.AnnotationsVersion) else known
    return evaluation.policy if isinstance(evaluation, names.EvaluationVersion) else None


def is_written_without_lease(key: str) -> bool:
    """Return whether `key` is written without the lease of a run: evaluations, histories, and what is in no run."""
    return run_of(key) is None or key.split("/")[2] in ("evaluations", "history")


def curriculum(name: str) -> names.CurriculumVersion:
    return names.CurriculumVersion(f"runs/{name}/curriculum")


def decision(name: str) -> names.DecisionVersion:
    return names.DecisionVersion(f"runs/{name}/decision")


def metrics_folder(name: str) -> str:
    return f"runs/{name}/metrics"


def metrics(name: str, first: int) -> str:
    """Return the file with a run's metrics from iteration `first` on."""
    return f"{metrics_folder(name)}/{first:06d}.jsonl"


def metrics_of_evaluation(scores: str) -> str:
    """Return the file with the metrics of an evaluation, given the version of its scores."""
    name, rest = scores.split("/", 2)[1], scores.split("/", 3)[3]
    return f"{metrics_folder(name)}/evaluation-{rest.replace('/', '-')}.jsonl"


def logs(name: str, time: str) -> str:
    """Return the folder of a run for the logs of nodes."""
    return f"runs/{name}/logs/{time}"


def manifest(version: str) -> str:
    return f"{version}/manifest.json"


SELECTION = "selection.json"
"""The file of a checkpoint that says which rows its update trained on, if these were chosen. gc never deletes it."""

STATE = "state/"
"""The beginning of the names of those files of a checkpoint that gc may delete alone."""


def tombstone(version: str, *, state: bool = False) -> str:
    """Return the key of the tombstone: gc has deleted the data of `version`, or only its `state`."""
    return f"{version}/collected{'-state' if state else ''}.json"


def journal(version: str) -> str:
    return f"{version}/journal"


CATALOG = "catalog"


def alias(name: str) -> str:
    return f"aliases/{name}"


_ALIAS = re.compile(
    r"(?!runs/[^/]+/|(problems|audits|exclusions)/)[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*(?<!\.json)"
)
"""Matches names of aliases; never the name of a version or of an entry of a log."""


def is_alias(name: str) -> bool:
    """Return whether `name` is a valid name of an alias."""
    return bool(_ALIAS.fullmatch(name))


def latest(run: str) -> str:
    """Return the alias that the pipeline moves to the newest checkpoint of a run."""
    return f"{run}/latest"


def lease(run: str) -> str:
    return f"leases/{run}"


def retraining(name: str) -> str:
    return f"retraining/{name}"


def beat(run: str, token: int) -> str:
    return f"leases/{run}/beats/{token:08d}.json"


# Older stores have evaluations without a set and a protocol.
_VERSION = re.compile(
    r"(?P<version>(problems|audits|exclusions)/[0-9a-f]+"
    r"|runs/[^/]+/(run|curriculum|decision|(checkpoints|trajectories|history)/\d{6}"
    r"|(scores|annotations)/\d{6}/[0-9a-f]+"
    r"|evaluations/\d{6}(/[^/]+/(greedy|sampled)-[0-9a-f]+)?(/(scores|annotations)/[0-9a-f]+)?))"
    r"/(manifest\.json|(?P<nonce>[0-9a-f]{12})/.+)"
)
"""Matches keys in folders that versions really have: stricter than their types, since gc deletes by it."""


def data_of(key: str) -> tuple[str, str] | None:
    """Return version and nonce of the attempt that wrote `key`: a data object, or its lease. None for other keys."""
    match = _VERSION.fullmatch(key.removeprefix(lease("")))
    return (match["version"], match["nonce"]) if match and match["nonce"] else None


def manifest_of(key: str) -> str | None:
    """Return the version whose manifest has the key `key`; None if it is not a manifest."""
    match = _VERSION.fullmatch(key)
    return None if match is None or match["nonce"] else match["version"]


def entry_of(key: str) -> tuple[str, int] | None:
    """Return the prefix of the log and the number of the entry with the key `key`; None if it is not an entry."""
    match = re.fullmatch(r"(?P<log>.+)/(?P<number>\d{8})\.json", key)
    return (match["log"], int(match["number"])) if match else None


def number_of(version: str) -> int | None:
    """Return the iteration or policy version of a version of a run; None for others."""
    parts = version.split("/")
    return int(parts[3]) if parts[0] == "runs" and len(parts) > 3 else None


def series_of(version: str) -> str:
    """Return the common prefix of versions of one kind of one run: `runs/<run>/<kind>`."""
    return "/".join(version.split("/")[:3])


def run_of(version: str) -> str | None:
    """Return the name of the run of `version`; None for versions of no run, such as problem sets."""
    parts = version.split("/")
    return parts[1] if parts[0] == "runs" and len(parts) > 2 else None
