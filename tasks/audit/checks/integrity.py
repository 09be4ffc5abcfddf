"""The check whether the stored policy gives the stored logprobs. `tokens.sql` has the other checks of tokens."""

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
    """A data set, with policy and sampling of most of its trajectories: a row of `played_sets` in `views.sql`."""

    number: int
    version: str
    policy: str
    policy_version: int
    sampling: str  # JSON
    temperature: float
    whole: bool  # every token could be sampled


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
    played = [_Played(*row) for row in evidence.database.all("from played_sets")]
    whole = [each for each in played if each.whole]
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

    of_set = played.number, played.policy, played.sampling, played.policy_version, count
    rows = evidence.database.all("from recomputed_rows(?, ?, ?, ?, ?)", *of_set)
    try:
        policy = open_checkpoint(evidence.store, played.policy, evidence.cache)
        tokens, served = [StoredTokens(*row[:5]) for row in rows], _served_format(evidence, played)
        compute = partial(recompute, policy.model, tokens, played.temperature, adapter=policy.adapter)
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
