"""Where versions live under the root. A version is a folder; its manifest makes it exist.

problems/<fingerprint>                      a problem set
audits/<fingerprint>                        what an audit of trajectories found, and its report
exclusions/<digest of its rows>             trajectories and problems that shall not be trained on
runs/<run>/run                              the run itself: its configuration
runs/<run>/checkpoints/<policy version>     weights, tokenizer, optimizer, RNG, canary
runs/<run>/trajectories/<iteration>         rolled out with the checkpoint of the same number
runs/<run>/scores/<iteration>/<scorer>      verdicts on those trajectories
runs/<run>/evaluations/<policy version>/<set>/<protocol>   trajectories on a set; `…/scores/<scorer>` beside them
runs/<run>/history/<iterations>             what became of each problem in so many iterations
runs/<run>/curriculum                       which problems it draws how often, where the runs before it say so
runs/<run>/decision                         retraining: champion or challenger, and why

Within a version:
manifest.json                               the commit
<nonce>/…                                   data objects of the attempt with that nonce
journal/<number>.json                       shards that a rollout has finished, so that it can be continued
collected.json                              gc took the data away; the manifest stays

And beside versions, logs of numbered entries that are created once (see `storage.logs.log`):
catalog/<number>.json                       every attempt to commit, in order
aliases/<name>/<number>.json                where an alias pointed
leases/<run>/<number>.json                  who may write a run; `beats/<number>.json` are his signs of life
retraining/<name>/<number>.json             nights that began and ended (see `storage.logs.nights`)
"""

import re

from storage.version_names import (
    AuditVersion,
    CurriculumVersion,
    DecisionVersion,
    EvaluationVersion,
    ExclusionsVersion,
    HistoryVersion,
    PolicyVersion,
    ProblemsVersion,
    RunVersion,
    ScoresVersion,
    TrajectoriesVersion,
    version_of,
)

AREAS = ("runs", "problems", "audits", "exclusions")
"""Where all versions lie."""


def problems(fingerprint: str) -> ProblemsVersion:
    return ProblemsVersion(f"problems/{fingerprint}")


def audit(fingerprint: str) -> AuditVersion:
    return AuditVersion(f"audits/{fingerprint}")


def exclusions(digest: str) -> ExclusionsVersion:
    return ExclusionsVersion(f"exclusions/{digest}")


def run(name: str) -> RunVersion:
    return RunVersion(f"runs/{name}/run")


def checkpoint(name: str, version: int) -> PolicyVersion:
    return PolicyVersion(f"runs/{name}/checkpoints/{version:06d}")


def trajectories(name: str, iteration: int) -> TrajectoriesVersion:
    return TrajectoriesVersion(f"runs/{name}/trajectories/{iteration:06d}")


def scores(name: str, iteration: int, scorer: str) -> ScoresVersion:
    return ScoresVersion(f"runs/{name}/scores/{iteration:06d}/{scorer}")


def evaluation(policy: PolicyVersion, set_name: str, protocol: str) -> EvaluationVersion:
    """The version of `policy`'s trajectories on the set `set_name`; `protocol` says how it was played."""
    return EvaluationVersion(f"runs/{policy.run}/evaluations/{policy.rpartition('/')[2]}/{set_name}/{protocol}")


def evaluation_scores(evaluation: EvaluationVersion, scorer: str) -> ScoresVersion:
    return ScoresVersion(f"{evaluation}/scores/{scorer}")


def evaluated_policy(version: str) -> PolicyVersion | None:
    """The checkpoint that an evaluation, or its scores, are about; None for other versions."""
    known = version_of(version)
    evaluation = known.evaluation if isinstance(known, ScoresVersion) else known
    return evaluation.policy if isinstance(evaluation, EvaluationVersion) else None


def is_anybodys(key: str) -> bool:
    """Whether `key` lies in a run, but may be written by who does not hold its lease: evaluations and histories."""
    return key.split("/")[2:3] in (["evaluations"], ["history"])


def history(name: str, iterations: int) -> HistoryVersion:
    return HistoryVersion(f"runs/{name}/history/{iterations:06d}")


def curriculum(name: str) -> CurriculumVersion:
    return CurriculumVersion(f"runs/{name}/curriculum")


def decision(name: str) -> DecisionVersion:
    return DecisionVersion(f"runs/{name}/decision")


def manifest(version: str) -> str:
    return f"{version}/manifest.json"


def tombstone(version: str) -> str:
    """Key of the note that gc has deleted the data of `version`."""
    return f"{version}/collected.json"


def journal(version: str) -> str:
    return f"{version}/journal"


CATALOG = "catalog"


def alias(name: str) -> str:
    return f"aliases/{name}"


_ALIAS = re.compile(
    r"(?!runs/[^/]+/|(problems|audits|exclusions)/)[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*(?<!\.json)"
)
"""Never the name of a version or of a log's entry."""


def is_alias(name: str) -> bool:
    """Whether an alias may be called so."""
    return bool(_ALIAS.fullmatch(name))


def latest(run: str) -> str:
    """The alias that the pipeline moves to the newest checkpoint of a run."""
    return f"{run}/latest"


def lease(run: str) -> str:
    return f"leases/{run}"


def retraining(name: str) -> str:
    return f"retraining/{name}"


def beat(run: str, token: int) -> str:
    return f"leases/{run}/beats/{token:08d}.json"


# Evaluations without a set and a protocol are those of older stores.
_VERSION = re.compile(
    r"(?P<version>(problems|audits|exclusions)/[0-9a-f]+"
    r"|runs/[^/]+/(run|curriculum|decision|(checkpoints|trajectories|history)/\d{6}"
    r"|scores/\d{6}/[0-9a-f]+|evaluations/\d{6}(/[^/]+/(greedy|sampled)-[0-9a-f]+)?(/scores/[0-9a-f]+)?))"
    r"/(manifest\.json|(?P<nonce>[0-9a-f]{12})/.+)"
)


def data_of(key: str) -> tuple[str, str] | None:
    """Version and nonce of the attempt that wrote `key`; None where it is no data object of a version."""
    match = _VERSION.fullmatch(key)
    return (match["version"], match["nonce"]) if match and match["nonce"] else None


def manifest_of(key: str) -> str | None:
    """The version whose manifest `key` is; None where it is none."""
    match = _VERSION.fullmatch(key)
    return None if match is None or match["nonce"] else match["version"]


_ENTRY = re.compile(r"(?P<log>.+)/(?P<number>\d{8})\.json")


def entry_of(key: str) -> tuple[str, int] | None:
    """Prefix of the log and number of the entry whose key this is; None where it is none."""
    match = _ENTRY.fullmatch(key)
    return (match["log"], int(match["number"])) if match else None


def number_of(version: str) -> int | None:
    """Iteration or policy version of a version of a run; None for others."""
    parts = version.split("/")
    return int(parts[3]) if parts[0] == "runs" and len(parts) > 3 else None


def series_of(version: str) -> str:
    """What versions of one kind of one run have in common: `runs/<run>/<kind>`."""
    return "/".join(version.split("/")[:3])


def run_of(version: str) -> str | None:
    """Name of the run that `version` belongs to, None for problem sets."""
    parts = version.split("/")
    return parts[1] if parts[0] == "runs" and len(parts) > 2 else None
