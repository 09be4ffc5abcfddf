"""Checks of the tokens of a row: mask, turns, versions and logprobs, and logprobs against the policy that is named."""

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from storage import layout
from storage.errors import StorageError, UnavailableError
from storage.records import HIGHEST_LOGPROB
from storage.versions import manifests
from storage.versions.checkpoints import open_checkpoint
from tasks.audit.checks import AuditEvidence, Measured, SkippedError, check, count_cases, share_of_cases
from tasks.audit.checks.templates import BEGINNINGS, TURNS
from tasks.audit.results import Case

if TYPE_CHECKING:
    from tasks.train.recompute import NumberFormat

_TRUE = "coalesce(list_sum({}::tinyint[]), 0)"

# The mask says which tokens are trained on, the turns which were sampled.
count_cases(
    "mask_and_spans",
    "Mask against turns",
    "trajectory",
    f"""select trajectory_id, data_set, case
        when not same then 'its token columns differ in length'
        when not inside then 'a turn lies outside of its tokens'
        else masked || ' tokens are in the mask, ' || spoken || ' in turns, ' || agreed || ' in both' end
    from (
        select trajectory_id, data_set,
            len(token_ids) = len(action_mask) and len(token_ids) = len(logprobs)
                and len(token_ids) = len(versions) as same,
            coalesce(list_bool_and(list_transform(turns, lambda t:
                0 <= t."start" and t."start" <= t."end" and t."end" <= len(token_ids))), true) as inside,
            {_TRUE.format("action_mask")} as masked,
            coalesce(list_sum(list_transform(turns, lambda t: t."end"::bigint - t."start")), 0) as spoken,
            coalesce(list_sum(list_transform(turns, lambda t:
                {_TRUE.format('action_mask[t."start"::bigint + 1:t."end"]')})), 0) as agreed
        from trajectories
    ) where not same or not inside or masked <> spoken or agreed <> spoken""",
    "in {found} of {of:,} rows mask and turns contradict each other",
)

# They make PPO's ratios infinite, or train on tokens that were never sampled.
count_cases(
    "bad_logprobs",
    "Impossible logprobs",
    "trajectory",
    f"""select trajectory_id, data_set, case
        when impossible > 0 then impossible || ' logprobs are not finite or above 0'
        else 'tokens that were not sampled have logprobs' end
    from (
        select trajectory_id, data_set,
            len(list_filter(logprobs, lambda p: not isfinite(p) or p > {HIGHEST_LOGPROB})) as impossible,
            len(list_filter(logprobs, lambda p: p <> 0)) as given,
            coalesce(list_sum(list_transform(turns, lambda t:
                len(list_filter(logprobs[t."start"::bigint + 1:t."end"], lambda p: p <> 0)))), 0) as sampled
        from trajectories
    ) where impossible > 0 or given <> sampled""",
    "{found} of {of:,} rows have impossible logprobs",
)

# Within a turn the version of a token may rise (new weights were swapped in), but never fall.
count_cases(
    "falling_versions",
    "Policy versions in turns",
    "trajectory",
    """select trajectory_id, data_set, case
        when unsorted then 'the policy version falls within a turn'
        when oldest < 0 then 'a sampled token has no policy version'
        when newest > newest_allowed then 'a token is of version ' || newest || ', newer than ' || newest_allowed
        else 'tokens that were not sampled have a policy version' end
    from (
        select trajectory_id, data_set, d.iteration as newest_allowed,
            coalesce(list_bool_or(list_transform(spans, lambda v: v <> list_sort(v))), false) as unsorted,
            list_min(flatten(spans)) as oldest, list_max(flatten(spans)) as newest,
            len(flatten(spans)) as sampled, len(list_filter(versions, lambda v: v <> -1)) as given
        from (
            select trajectory_id, data_set, versions,
                list_transform(turns, lambda t: versions[t."start"::bigint + 1:t."end"]) as spans
            from trajectories
        ) join data_sets d using (data_set)
    ) where unsorted or oldest < 0 or newest > newest_allowed or sampled <> given""",
    "{found} of {of:,} rows have impossible policy versions",
)

_DISORDER = """
    select trajectory_id, data_set, 'turn ' || (turn + 1) || case
        when "start" < after then ' begins before the end of the tokens before it'
        when crossed then ' lies across two sequences'
        when follows not between -1 and turns - 1 or follows = turn then ' follows a turn that does not exist'
        else ' follows turn ' || (follows + 1) || ' and not the one before it in its sequence' end
    from (
        select *, len(list_filter(starts, lambda b: b >= "start" and b < "end")) > 0 as crossed,
            turn > 0 and len(list_filter(starts, lambda b: b >= after and b <= "start")) = 0 as inside
        from (
            select t.trajectory_id, t.data_set, t.turn, t.follows, t."start", t."end", s.starts, s.turns,
                coalesce(lag(t."end") over (partition by t.row order by t.turn), 1) as after
            from turns t join (
                select row, sequence_starts as starts, len(turns) as turns from trajectories
            ) s using (row)
        )
    )
    where "start" < after or crossed or follows not between -1 and turns - 1 or follows = turn
        or (inside and follows <> turn - 1)"""

_LOST_CALLS = """
    select c.trajectory_id, c.data_set, 'it has a call in turn ' || (c.turn + 1) || ', which does not exist'
    from calls c left join turns t on t.row = c.row and t.turn = c.turn where t.row is null"""

# If no prompt of a group has a majority, the agent varies prompts on purpose, and the group is not checked. An episode
# of several conversations has the prompt of its group if one of them has it.
_OTHER_PROMPT = f"""
    with beginnings as (
        select row, trajectory_id, data_set, problem_id, digest from ({BEGINNINGS}) where len(turns) > 0
    ), counted as (
        select data_set, problem_id, digest, count(distinct row) as here, any_value(rows) as rows
        from beginnings join (
            select data_set, problem_id, count(*) as rows from trajectories where len(turns) > 0 group by all
        ) using (data_set, problem_id) group by data_set, problem_id, digest
    ), usual as (
        select data_set, problem_id, digest from counted where 2 * here > rows and here < rows
    )
    select any_value(b.trajectory_id), b.data_set, 'its prompt has other tokens than most of its group'
    from beginnings b join usual u using (data_set, problem_id)
    group by b.row, b.data_set having not bool_or(b.digest = u.digest)"""

# Turns must be in order, each in one sequence, and a group has one prompt.
count_cases(
    "broken_prefix",
    "Turns that do not continue",
    "trajectory",
    f"({_DISORDER}) union all ({_LOST_CALLS}) union all ({_OTHER_PROMPT})",
    "in {found} of {of:,} rows a turn does not continue the tokens before it",
)

_LONG = 32  # tokens; shorter turns have too few 4-grams

# The policy finds no end or has collapsed.
share_of_cases(
    "loops",
    "Turns that repeat themselves",
    "turn",
    f"""select trajectory_id, data_set,
        'turn ' || (turn + 1) || ': ' || round(100 * repeated)::integer || ' % of its 4-grams are repetitions',
        repeated > 0.5
    from (
        select *, if(length >= {_LONG}, 1 - list_unique(grams) / len(grams), 0) as repeated from (
            select data_set, trajectory_id, turn, len(ids) as length, list_transform(
                range(1, len(ids) - 2), lambda i: hash(ids[i], ids[i + 1], ids[i + 2], ids[i + 3])
            ) as grams
            from ({TURNS}) where tokens >= {_LONG}
        )
    )""",
    f"turns of {_LONG} tokens or more repeat themselves",
)

_BEHIND = """
    select trajectory_id, data_set, allowed,
        d.iteration - list_min(list_filter(versions, lambda v: v >= 0)) as behind
    from trajectories join data_sets d using (data_set) where not d.evaluation"""


@check("staleness", "Staleness", "trajectory")
def staleness(evidence: AuditEvidence) -> Measured:
    """Measure by how many versions the stalest row exceeds the `rollout.max_head_offpolicyness` of its data set.

    Evaluations are not checked.
    """
    evidence.database.flag(
        "staleness",
        "trajectory",
        f"""select trajectory_id, data_set, 'it is ' || behind || ' versions behind, ' || allowed || ' are allowed'
        from ({_BEHIND}) where behind > allowed""",
    )
    query = f"select count(*), max(behind - allowed), max(behind) from ({_BEHIND})"
    rows, worst, most = evidence.database.one(query)
    over = max(0, worst or 0)
    says = f"the stalest of {rows:,} rows is {most or 0} versions behind, {over} more than allowed"
    return Measured(over, rows, says)


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

    @property
    def has_full_distribution(self) -> bool:
        """Return whether the logprobs are from the whole distribution, not cut by top_p or top_k."""
        return self._parameter("top_p", 1.0) == 1 and self._parameter("top_k", 0.0) <= 0

    @property
    def temperature(self) -> float:
        """The temperature of the stored logprobs; after greedy sampling engines return those of temperature 1."""
        return self._parameter("temperature", 1.0) or 1.0

    def _parameter(self, name: str, default: float) -> float:
        """Return a sampling parameter, or NaN, which fulfils no condition, if it cannot be read."""
        try:
            return float(json.loads(self.sampling).get(name, default))
        except (AttributeError, TypeError, ValueError):
            return math.nan


@dataclass(frozen=True, slots=True)
class _Difference:
    """The differences between the stored and the recomputed logprobs of one trajectory."""

    trajectory_id: str
    nats: Nats  # A, for the action tokens of the data set's policy version
    rounding: Nats  # A, between float32 and the number format of the engine


@check("logprob_drift", "Logprobs and the policy that is named", "trajectory")
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
    if not evidence.settings.recomputed:
        raise SkippedError("audit.recomputed=0: no trajectory is recomputed")
    chosen, compared, beyond, failures = _chosen(evidence), 0, [0.0], list[str]()
    for place, played in enumerate(chosen):
        count = evidence.settings.recomputed // len(chosen) + (place < evidence.settings.recomputed % len(chosen))
        try:
            differences = _differences(evidence, played, count)
        except SkippedError as error:
            failures.append(str(error))
            continue
        if differences:
            compared += len(differences)
            mean = float(np.concatenate([each.nats for each in differences]).mean())
            evidence.drifts[played.version] = mean
            rounding = float(np.concatenate([each.rounding for each in differences]).mean())
            beyond.append(mean - _SLACK * rounding)
            limit = evidence.settings.checks.logprob_drift.threshold + _OF_ONE * rounding
            evidence.database.flag_all("logprob_drift", _cases(played, differences, limit))
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
    if played and not any(each.has_full_distribution for each in played):
        raise SkippedError(
            f"sampled with top_p or top_k ({played[0].sampling}): logprobs of a cut distribution cannot be compared"
        )
    kept = [each for each in played if each.has_full_distribution and _is_in_store(evidence, each.policy)]
    if not kept:
        raise SkippedError("no checkpoint that played these data sets is left in the store")
    count = min(evidence.settings.recomputed_sets, evidence.settings.recomputed)
    return [kept[place] for place in np.unique(np.linspace(0, len(kept) - 1, count).astype(int))]


def _is_in_store(evidence: AuditEvidence, policy: str) -> bool:
    store = evidence.store
    return bool(policy) and manifests.committed(store, policy) and not store.exists(layout.tombstone(policy))


def _differences(evidence: AuditEvidence, played: _Played, count: int) -> list[_Difference]:
    """Recompute up to `count` trajectories; compare the tokens that the data set's policy version sampled.

    Stored NaN and infinity are left out, because the check `bad_logprobs` reports them.
    """
    from tasks.train.recompute import StoredTokens, recompute

    rows = evidence.database.all(
        """select trajectory_id, token_ids, action_mask, sequence_starts, logprobs, versions from trajectories
        where data_set = ? and policy = ? and sampling = ? and list_contains(versions, ?)
            and len(logprobs) = len(token_ids) and len(versions) = len(token_ids) and len(action_mask) = len(token_ids)
        order by hash(trajectory_id), row limit ?""",
        *(played.number, played.policy, played.sampling, played.policy_version, count),
    )
    try:
        model = open_checkpoint(evidence.store, played.policy, evidence.cache).model
        tokens, served = [StoredTokens(*row[:4]) for row in rows], _served_format(evidence, played)
        exact = recompute(model, tokens, played.temperature)
        rounded = recompute(model, tokens, played.temperature, number_format=served) if served != "float32" else exact
    except UnavailableError:
        raise
    except (StorageError, ValueError, OSError) as error:
        raise SkippedError(f"the policy {played.policy} cannot be loaded: {error}") from error
    differences = []
    for (name, _, mask, _, logprobs, versions), of_row, of_served in zip(rows, exact, rounded, strict=True):
        if of_row is not None:
            sampled = np.array(mask)
            stored, by_policy = np.array(logprobs)[sampled], np.array(versions)[sampled] == played.policy_version
            compared = by_policy & np.isfinite(stored)
            nats, rounding = (_distance(each, of_row)[compared] for each in (stored, of_served))
            differences.append(_Difference(name, nats, rounding))
    return [each for each in differences if each.nats.size]


def _served_format(evidence: AuditEvidence, played: _Played) -> "NumberFormat":
    """Return the number format of the engine that played a data set."""
    from tasks.train.recompute import NumberFormat

    manifest = evidence.data_sets[played.number].manifest
    served = manifest.knob("inference.dtype") if manifest else None
    return next((name for name in get_args(NumberFormat) if name == served), "float32")


def _distance(left: Any, right: Any) -> Nats:
    nats: Nats = np.nan_to_num(np.abs(left - right), nan=_WORST, posinf=_WORST).clip(max=_WORST)
    return nats


def _cases(played: _Played, differences: list[_Difference], limit: float) -> list[Case]:
    means = [(each.trajectory_id, float(each.nats.mean())) for each in differences]
    detail = f"nats a token from those of {played.policy}"
    return [
        Case("trajectory", name, played.version, f"its logprobs are {mean:.3g} {detail}")
        for name, mean in means
        if mean > limit
    ]
