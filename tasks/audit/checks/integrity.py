"""Checks of the store: objects, schemas and parents, and whether the stored policy gives the stored logprobs.

`tokens.sql` has the other checks of tokens: mask, turns, versions and staleness. `verdicts.sql` has those of scores
that are missing.
"""

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from storage import layout
from storage.errors import StorageError, UnavailableError
from storage.versions import manifests
from storage.versions.checkpoints import open_checkpoint
from tasks.audit.checks import AuditEvidence, Measured, SkippedError, check
from tasks.tables.sets import Case

if TYPE_CHECKING:
    from tasks.train.policy import NumberFormat

_WORST = 100.0
"""The difference in nats that replaces NaN and infinity."""
_SLACK = 1.5
"""Largest rounding of an engine, as a multiple of that of the recomputation: its kernels are others."""
_OF_ONE = 3.0
"""Largest multiple for a single trajectory."""

Nats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class _Played:
    """A data set, with the policy and the sampling of most of its trajectories."""

    number: int
    version: str
    policy: str
    policy_version: int
    sampling: str  # JSON

    def parameter(self, name: str, default: float) -> float:
        """Return a sampling parameter, or NaN, which fulfils no condition, if it cannot be read."""
        try:
            return float(json.loads(self.sampling).get(name, default))
        except (AttributeError, TypeError, ValueError):
            return math.nan

    @property
    def samples_all_tokens(self) -> bool:
        """True if every token could be sampled: neither `top_p`, `top_k` nor a JSON schema left one out."""
        return self.parameter("top_p", 1) == 1 and self.parameter("top_k", 0) <= 0 == self.parameter("json_schema", 0)


@check("logprob_drift", "trajectory", needs="tokens logprobs versions")
def logprob_drift(evidence: AuditEvidence) -> Measured:
    """Recompute stored logprobs with the stored weights: a difference means that another policy played.

    Trajectories of the first, some middle and the last data set are recomputed. The value is the largest mean
    difference of a data set, minus what the engine's number format explains.

    An engine that serves in half precision differs from float32 by rounding. By how much depends on the model: 0.02
    nats a token for some, 0.1 for others. So the same tokens are recomputed in its number format, too, and the stored
    logprobs may differ from the float32 ones by `_SLACK` times as much as these do.

    Example: SmolLM2-135M, served in bfloat16. Its stored logprobs differ by 0.034 nats from the float32 ones, and those
    recomputed in bfloat16 by 0.035. The logprobs of the next policy version differ by 0.20.
    """
    recomputed, threshold = evidence.settings.recomputed, evidence.settings.checks.logprob_drift.threshold
    if not recomputed:
        raise SkippedError("audit.recomputed=0: no trajectory is recomputed")
    chosen, compared, beyond, failures = _chosen(evidence), 0, [0.0], list[str]()
    for number, played in enumerate(chosen):
        count = recomputed // len(chosen) + (number < recomputed % len(chosen))
        try:
            differences = _differences(evidence, played, count)
        except SkippedError as error:
            failures.append(str(error))
            continue
        if differences:
            compared += len(differences)
            mean, rounding = (float(np.concatenate([each[at] for each in differences]).mean()) for at in (1, 2))
            evidence.drifts[played.version] = mean
            beyond.append(mean - _SLACK * rounding)
            apart = f"nats a token from those of {played.policy}"
            cases = [
                Case("trajectory", name, played.version, f"its logprobs are {nats.mean():.3g} {apart}")
                for name, nats, _ in differences
                if nats.mean() > threshold + _OF_ONE * rounding
            ]
            evidence.database.flag_all("logprob_drift", cases)
    if not compared:
        failures.append("no trajectory has whole token columns and tokens of the policy that it names")
        raise SkippedError("; ".join(failures))
    means = ", ".join(f"{mean:.2g} in {version}" for version, mean in evidence.drifts.items())
    says = f"mean difference of {compared:,} trajectories in nats a token: {'; '.join([means, *failures])}"
    return Measured(max(beyond), compared, says)


def _chosen(evidence: AuditEvidence) -> list[_Played]:
    """Choose data sets at equal distances, the first and last included, whose policy is still in the store."""
    rows = evidence.database.all(
        """select data_set, version, policy, policy_version, sampling from (
            select data_set, policy, policy_version, sampling, count(*) as rows from trajectories group by all
        ) join (select data_set, version, run, evaluation, iteration from data_sets) using (data_set)
        qualify row_number() over (partition by data_set order by rows desc, policy, sampling) = 1
        order by run, evaluation, iteration, data_set"""
    )
    played = [_Played(*row) for row in rows]
    whole = [each for each in played if each.samples_all_tokens]
    if played and not whole:
        cut = "sampled with top_p, top_k or a JSON schema, and logprobs of a cut distribution cannot be compared"
        raise SkippedError(f"{cut}: {played[0].sampling}")
    store = evidence.store
    gone = {each.policy for each in whole if not each.policy or not manifests.committed(store, each.policy)}
    kept = [each for each in whole if not (each.policy in gone or store.exists(layout.tombstone(each.policy)))]
    if not kept:
        raise SkippedError("no checkpoint that played these data sets is left in the store")
    count = min(evidence.settings.recomputed_sets, evidence.settings.recomputed)
    return [kept[index] for index in np.unique(np.linspace(0, len(kept) - 1, count).astype(int))]


def _differences(evidence: AuditEvidence, played: _Played, count: int) -> list[tuple[str, Nats, Nats]]:
    """Recompute up to `count` trajectories; compare the A tokens of each that the data set's policy version sampled.

    Return id, differences to the stored logprobs, and those between float32 and the number format of the engine.
    Stored NaN and infinity are left out, because the check `bad_logprobs` reports them.
    """
    from tasks.train.policy import StoredTokens, recompute

    rows = evidence.database.all(
        """select trajectory_id, token_ids, action_mask, sequence_starts, experts, logprobs, versions from trajectories
        where data_set = ? and policy = ? and sampling = ? and list_contains(versions, ?)
            and len(logprobs) = len(token_ids) and len(versions) = len(token_ids) and len(action_mask) = len(token_ids)
        order by hash(trajectory_id), row limit ?""",
        *(played.number, played.policy, played.sampling, played.policy_version, count),
    )
    temperature = played.parameter("temperature", 1.0) or 1.0  # engines return logprobs of 1 after greedy sampling
    try:
        policy = open_checkpoint(evidence.store, played.policy, evidence.cache)
        tokens, served = [StoredTokens(*row[:5]) for row in rows], _served_format(evidence, played)
        compute = partial(recompute, policy.model, tokens, temperature, adapter=policy.adapter)
        exact = compute()
        rounded = compute(number_format=served) if served != "float32" else exact
    except UnavailableError:
        raise
    except (StorageError, ValueError, OSError) as error:
        raise SkippedError(f"the policy {played.policy} cannot be loaded: {error}") from error
    differences = []
    for (name, _, mask, _, _, logprobs, versions), of_row, of_served in zip(rows, exact, rounded, strict=True):
        if of_row is not None:
            stored = np.array(logprobs)[mask]
            compared = (np.array(versions)[mask] == played.policy_version) & np.isfinite(stored)
            if compared.any():
                nats, rounding = (_distance(each, of_row)[compared] for each in (stored, of_served))
                differences.append((name, nats, rounding))
    return differences


def _served_format(evidence: AuditEvidence, played: _Played) -> "NumberFormat":
    """Return the number format of the engine that played a data set."""
    from tasks.train.policy import NumberFormat

    manifest = evidence.data_sets[played.number].manifest
    served = manifest.knob("inference.dtype") if manifest else None
    return next((name for name in get_args(NumberFormat) if name == served), "float32")


def _distance(left: Any, right: Any) -> Nats:
    nats: Nats = np.nan_to_num(np.abs(left - right), nan=_WORST, posinf=_WORST).clip(max=_WORST)
    return nats


@check("damaged_objects", "object", needs="nothing")
def damaged_objects(evidence: AuditEvidence) -> Measured:
    """Count the objects that differ from their manifests (`tasks.tables.sets`).

    Damaged objects are left out of all other checks.
    """
    intake = evidence.intake
    found = evidence.database.flag_all("damaged_objects", intake.damaged)
    gone = f"; the data of {len(intake.collected)} data sets were collected by gc" if intake.collected else ""
    return Measured(found, intake.objects, f"{found} of {intake.objects} objects are missing or damaged{gone}")


@check("wrong_schema", "object", needs="nothing")
def wrong_schema(evidence: AuditEvidence) -> Measured:
    """Count files that are not Parquet, or have a newer or another schema. They are left out of all other checks."""
    found, of = evidence.database.flag_all("wrong_schema", evidence.intake.foreign), evidence.intake.objects
    return Measured(found, of, f"{found} of {of} files have an unknown schema")


@check("broken_parents", "object", needs="nothing")
def broken_parents(evidence: AuditEvidence) -> Measured:
    """Count parents whose manifest is missing or has another hash, and rows that name another policy or problem set."""
    orphaned = evidence.database.flag_all("broken_parents", evidence.intake.orphaned)
    mismatched = evidence.database.flag("broken_parents", "trajectory", "from other_parents")
    parents = evidence.intake.parents
    says = f"{orphaned} of {parents} parents are missing or changed; {mismatched} rows name other parents"
    return Measured(orphaned + mismatched, parents, says)
