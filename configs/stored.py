"""Convert stored configurations to the schema of this program, and say what became of the knobs of older ones.

A manifest or a night holds the configuration of the program that wrote it, and is never rewritten. `up_to_date`
converts it for readers: knobs that were renamed get their present names, `CHANGES` says which knobs are gone and how
programs behaved before a knob came, and every other missing knob gets its default. A run or a night is continued only
if it was begun with no behaviour that this program lacks (`lost`).

Example: {"ppo": {"minibatches": 2}} becomes {"train": {"minibatches": 2, …}, "algorithm": {"type": "ppo", …}, …}
"""

import copy
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from configs.algorithms import OwnAlgorithm
from configs.knobs import section_of
from configs.schema import Config

Values = dict[str, Any]
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """A knob that came, or went, with another behaviour.

    Args:
        knob: its dotted key; a star stands for any name.
        was: the behaviour from before there was the knob, as its value. Without it that is the default.
        now: of a knob that is gone, the value that all runs have now.
        note: of a knob that is gone and never changed a result, what became of it.

    Example: with Change("reward.failed", was="least", now="leave-out") a stored configuration without `reward.failed`,
    of a program from before it, trained on failed verdicts. Nobody can choose that any more.
    """

    knob: str
    was: Any = _ABSENT
    now: Any = _ABSENT
    note: str = ""

    @property
    def is_gone(self) -> bool:
        return self.now is not _ABSENT or bool(self.note)


_OF_TRAIN = (
    *("mask_truncated", "routing_replay", "epochs", "micro_batch_tokens", "device", "autocast"),
    *("gradient_checkpointing", "threads", "parallel"),
)
"""Knobs that were in the section `ppo` and are in `train`; the others are in `algorithm`."""
_OBJECTIVE = "algorithm.objective says it: decoupled, recomputed or behaviour"
_NEVER_ON_A_GPU = "it was made for GPUs, and never ran on one; leave it out"
_IN_FLOAT32 = "servers fetch the weights in float32 and round them"
_CONSTANTS = """
algorithm.logprob_chunk_tokens audit.least_episodes audit.least_judged audit.recomputed_sets
evaluation.sets.*.max_line_mb problems.*.max_line_mb policy.warm_start.batch_size policy.warm_start.heads
policy.warm_start.kv_heads policy.warm_start.lr retrain.gate.hacking_gain retrain.gate.max_failed_verdicts
rollout.request_retries run.lease_s storage.patience_s storage.request_timeout_s
"""
CHANGES: Sequence[Change] = (
    Change("algorithm.advantage.baseline", was="turn"),
    Change("algorithm.advantage.bound", was=None),
    Change("algorithm.advantage.credit", was="order", now="causes"),
    Change("algorithm.advantage.scale_penalties", was=True, now=False),
    Change("algorithm.behaviour_weight.cap", was=None),
    Change("algorithm.c_clip", was=None),
    Change("algorithm.critic.value_norm", now="exp"),
    Change("algorithm.critic.value_norm_beta", now=0.99995),
    Change("algorithm.kl.ema_decay", now=0.99),
    Change("algorithm.kl.horizon", now=10_000),
    Change("algorithm.ratio_to", now="recomputed"),
    Change("inference.swap", now="reload"),
    Change("policy.lora.dropout", now=0.0),
    Change("problems.sampling.last_episodes", now=64),
    Change("problems.sampling.least_episodes", now=16),
    Change("problems.shares", was="draws", now="learning"),
    Change("problems.without_room", was="play", now="leave-out"),
    Change("retrain.gate.max_by_luck", was=None),
    Change("reward.failed", was="least", now="leave-out"),
    Change("reward.max_clip", was=20.0),
    Change("reward.shape", was="success"),
    Change("reward.unfinished", was="leave-out", now="least"),
    Change("rollout.allow_own_sampling", was=True),
    Change("rollout.policy_lag", now=0),
    Change("score.memory_mb", now=2048),
    Change("score.reading", was="library", now="answer"),
    Change("score.success", was="reward", now="said"),
    Change("score.tries", was="sum"),
    Change("storage.keep", was=None),
    Change("agent.args.hide_processes", note="a command sees all processes of its user"),
    Change("algorithm.recompute_logprob", note=_OBJECTIVE),
    Change("algorithm.use_decoupled_loss", note=_OBJECTIVE),
    Change("cluster.gpus_per_worker", note="a worker needs those of its inference.replicas servers"),
    Change("cluster.judges", note="nodes without room for a rollout worker grade"),
    Change("cost", note="`python -m flows.watch RUN --per-hour PRICE` says it"),
    Change("evaluation.contamination", note="a night leaves out training problems that are in an evaluation set"),
    Change("inference.kv_cache_gib", note="it is 1; more is inference.extra_args=[--kv-cache-memory-bytes, …]"),
    Change(
        "ppo",
        note=f"train has {', '.join(_OF_TRAIN)} and, for ppo_n_minibatches, minibatches; algorithm has the others",
    ),
    Change(
        "rollout.processes",
        note="set cluster.workers_per_node. Each worker has inference.replicas, rollout.concurrency and score.workers "
        "of its own: divide them",
    ),
    Change("rollout.request_timeout_s", note="a completion takes at most half of rollout.episode_deadline_s"),
    Change("storage.serving_copy", note=_IN_FLOAT32),
    Change("storage.whole_copy_every", note=_IN_FLOAT32),
    Change("train.kernels", note=_NEVER_ON_A_GPU),
    Change("train.max_restarts", note="a flow that lost a rank is started again"),
    Change("train.moments", note=_NEVER_ON_A_GPU),
    Change("trainer", note="its knobs are in train: on_cluster, timeout_s, startup_timeout_s"),
    *(Change(knob, note="it is a constant: leave it out") for knob in _CONSTANTS.split()),
)
"""All knobs that came or went with another behaviour. None is ever removed, because old stores still exist."""


def former(key: str) -> str | None:
    """Return what became of a former knob, for users who still set it; None if `key` was none."""
    gone = (change for change in CHANGES if change.is_gone and fnmatch(key, change.knob))
    return next((change.note or f"it is always {change.now}" for change in gone), None)


def _converted(stored: Values) -> Values:
    """Return a copy in which renamed knobs have their present names, and changed values their present meaning."""
    values = copy.deepcopy(stored)
    evaluation, cluster = (values.get(name) for name in ("evaluation", "cluster"))
    if isinstance(evaluation, dict) and evaluation.get("temperature") == 0:  # all samples were greedy
        evaluation |= {"samples": 0, "temperature": 1.0}
    if isinstance(cluster, dict) and "start_timeout_s" in cluster:
        cluster["startup_timeout_s"] = cluster.pop("start_timeout_s")
    ppo = values.pop("ppo", _ABSENT)
    if isinstance(ppo, dict):
        _divide(ppo, values)
    elif ppo is not _ABSENT:
        values["algorithm"] = ppo  # refused when the values are read
    return values


def _divide(ppo: Values, values: Values) -> None:
    """Divide the section `ppo` of the only algorithm that there was into `algorithm` and `train`."""
    for old in ("minibatches", "ppo_n_minibatches"):
        if old in ppo:
            _put(values, "train.minibatches", ppo.pop(old))
    for name in (*_OF_TRAIN, "kernels", "moments"):
        if name in ppo:
            _put(values, f"train.{name}", ppo.pop(name))
    if "behaviour_weight_cap" in ppo:
        _put(ppo, "behaviour_weight.cap", ppo.pop("behaviour_weight_cap"))
    if isinstance(kl := ppo.get("kl"), dict) and kl.get("place") == "none":  # no penalty, whatever the others were
        ppo["kl"] = {}
    stored = [ppo.pop("use_decoupled_loss", _ABSENT), ppo.pop("recompute_logprob", _ABSENT)]
    if stored != [_ABSENT, _ABSENT]:  # without recomputed logprobs the decoupled objective was plain PPO, too
        ppo["objective"] = "behaviour" if False in stored else "decoupled"
    values["algorithm"] = {"type": "ppo", **ppo}


def up_to_date(stored: Values) -> Values:
    """Convert a stored configuration to this program's schema; knobs and values that it does not know stay in it.

    >>> up_to_date({"ppo": {"minibatches": 2}})["train"]["minibatches"]
    2
    """
    values = _converted(stored)
    for change in CHANGES:
        if change.is_gone:
            _pop(values, change.knob)
        elif _get(values, change.knob) is _ABSENT and change.was is not _ABSENT and _has(values, change.knob):
            _put(values, change.knob, change.was)
    return _filled(Config, values)


def formerly(stored: Values) -> Values:
    """Return the knobs of a stored configuration that are gone, if they had another value than all runs have now.

    >>> formerly({"release": 1, "algorithm": {"kl": {"horizon": 100}}})
    {'algorithm.kl.horizon': 100}
    """
    values, found = _converted(stored), Values()
    for change in (change for change in CHANGES if change.now is not _ABSENT):
        value = _get(values, change.knob)
        # Programs from before `release` stored all knobs that they knew: one that is missing came later.
        if value is _ABSENT and "release" not in values and _has(values, change.knob):
            value = change.was
        if value not in (_ABSENT, change.now):
            found[change.knob] = value
    return found


def lost(stored: Values) -> list[str]:
    """List the behaviours of a stored configuration that this program lacks, as `key: old -> new`."""
    former, now = formerly(stored), {change.knob: change.now for change in CHANGES}
    return [f"{knob}: {value!r} -> {now[knob]!r}" for knob, value in former.items()]


def _has(values: Values, knob: str) -> bool:
    """Return whether the algorithm of a configuration has a knob, or its section; all have those of other sections."""
    if not knob.startswith("algorithm."):
        return True
    kind = _get(values, "algorithm.type")
    own = section_of(Config.model_fields["algorithm"].annotation, {"type": "ppo" if kind is _ABSENT else kind})
    return knob.split(".")[1] in (own or OwnAlgorithm).model_fields


def with_knobs(values: Values, others: Values, keys: Iterable[str]) -> Values:
    """Return `values` with the knobs or sections at the dotted `keys` of `others`, as far as both can have them."""
    values = copy.deepcopy(values)
    for key in keys:
        if (value := _get(others, key)) is not _ABSENT:
            _put(values, key, value)
    return values


def _filled(model: type[BaseModel], values: Values) -> Values:
    """Return `values` of a section with the defaults of all missing knobs."""
    known = {}
    for name, field in model.model_fields.items():
        if name in values:
            known[name] = _filled_value(field.annotation, values[name])
        elif not field.is_required():
            known[name] = to_jsonable_python(field.get_default(call_default_factory=True))
    return values | known


def _filled_value(annotation: Any, value: Any) -> Any:
    if isinstance(value, list) and (of_item := _item_of(annotation)):
        return [_filled_value(of_item, inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if typing.get_origin(annotation) is dict:
        return {name: _filled_value(typing.get_args(annotation)[1], inner) for name, inner in value.items()}
    section = section_of(annotation, value)
    return _filled(section, value) if section else value


def _item_of(annotation: Any) -> Any:
    """Return the annotation of the items of a list; None if no list is allowed."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is list:
        return arguments[0]
    return next(filter(None, map(_item_of, arguments)), None)


def _sections(values: Any, path: Sequence[str]) -> Iterator[Values]:
    """Yield the mappings at a path of keys, in which a star stands for any key."""
    if not isinstance(values, dict):
        return
    if not path:
        yield values
        return
    for name in values if path[0] == "*" else path[:1]:
        yield from _sections(values.get(name), path[1:])


def _pop(values: Values, key: str) -> Any:
    """Remove the value at a dotted key, with a star all values, and return the last; `_ABSENT` if there is none."""
    *path, name = key.split(".")
    return [_ABSENT, *(section.pop(name, _ABSENT) for section in _sections(values, path))][-1]


def _get(values: Values, key: str) -> Any:
    """Return the value at a dotted key; `_ABSENT` if there is none."""
    *path, name = key.split(".")
    return next((section.get(name, _ABSENT) for section in _sections(values, path)), _ABSENT)


def _put(values: Values, key: str, value: Any) -> None:
    """Set a knob, unless a section above it is no mapping, which is refused when the values are read."""
    *path, name = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            return
    values[name] = value
