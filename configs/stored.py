"""Convert stored configurations to the schema of this program, and say what became of the knobs of older ones.

A manifest or a night holds the configuration of the program that wrote it, and is never rewritten. Readers bring it up
to date: they apply `MIGRATIONS` in order and then add every missing knob, with its value in `BEFORE` or else its
default. So a new knob whose default is not the behaviour from before it needs a line in `BEFORE`.

Example: {"ppo": {"minibatches": 2}} becomes {"train": {"minibatches": 2, …}, "algorithm": {"type": "ppo", …}, …}
"""

import argparse
import copy
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from configs.algorithms import OwnAlgorithm
from configs.inference import FLOAT32_TOLERANCE
from configs.knobs import section_of
from configs.schema import Config

Values = dict[str, Any]
Migration = Callable[[Values], None]
"""Changes a whole configuration in place, and changes nothing in one that is already up to date."""

_ABSENT = object()

_CONSTANTS = """
audit.least_episodes audit.least_judged audit.recomputed_sets evaluation.sets.*.max_line_mb problems.*.max_line_mb
policy.warm_start.batch_size policy.warm_start.heads policy.warm_start.kv_heads policy.warm_start.lr
ppo.logprob_chunk_tokens retrain.gate.hacking_gain retrain.gate.max_failed_verdicts rollout.request_retries
run.lease_s storage.patience_s storage.request_timeout_s
"""
LIMITS: Mapping[str, str] = {
    "cluster.gpus_per_worker": "a worker needs those of its inference.replicas servers",
    "cluster.judges": "nodes without room for a rollout worker grade",
    "inference.kv_cache_gib": "it is 1; more is inference.extra_args=[--kv-cache-memory-bytes, …]",
    "rollout.request_timeout_s": "a completion takes at most half of rollout.episode_deadline_s",
    "storage.serving_copy": "servers fetch the weights in float32 and round them",
    "storage.whole_copy_every": "servers fetch the weights in float32 and round them",
} | dict.fromkeys(_CONSTANTS.split(), "it is a constant: leave it out")
"""Knobs that are gone and changed no result of a run that has begun, so stored values are dropped."""

FIXED: Mapping[str, Any] = {
    "algorithm.critic.value_norm": "exp",
    "algorithm.critic.value_norm_beta": 0.99995,
    "algorithm.kl.ema_decay": 0.99,
    "algorithm.kl.horizon": 10_000,
    "problems.sampling.last_episodes": 64,
    "problems.sampling.least_episodes": 16,
    "rollout.policy_lag": 0,
    "score.memory_mb": 2048,
}
"""Knobs that became constants, with their value. A run that was begun with another one is refused."""

_OF_TRAIN = (
    *("mask_truncated", "routing_replay", "epochs", "micro_batch_tokens", "device", "autocast", "kernels", "moments"),
    *("gradient_checkpointing", "threads", "parallel"),
)
"""Knobs that were in the section `ppo` and are in `train`; the others are in `algorithm`."""
_OBJECTIVE = "algorithm.objective says it: decoupled, recomputed or behaviour"
FORMER: Mapping[str, str] = {
    **LIMITS,
    **{key: f"it is always {value}" for key, value in FIXED.items()},
    "algorithm.use_decoupled_loss": _OBJECTIVE,
    "algorithm.recompute_logprob": _OBJECTIVE,
    "ppo": f"train has {', '.join(_OF_TRAIN)} and, for ppo_n_minibatches, minibatches; algorithm has the others",
    "rollout.processes": "set cluster.workers_per_node. Each worker has inference.replicas, rollout.concurrency and "
    "score.workers of its own: divide them",
    "trainer": "its knobs are in train: on_cluster, timeout_s, startup_timeout_s, max_restarts",
}
"""Sentences for users who still set a former knob: what became of it. A star stands for any text in a key."""


def former(key: str) -> str | None:
    """Return what became of a former knob; None if `key` was none."""
    return next((sentence for pattern, sentence in FORMER.items() if fnmatch(key, pattern)), None)


def renamed(old: str, new: str, value: Callable[[Any], Any] = lambda value: value) -> Migration:
    """Return a migration that renames the knob `old` to `new` and converts its value with `value`.

    A stored configuration does not say which schema it follows. So a knob whose values change their meaning is renamed,
    too: `renamed("run.max_minutes", "run.max_seconds", lambda minutes: 60 * minutes)`.
    """

    def migrate(values: Values) -> None:
        if (stored := _pop(values, old)) is not _ABSENT:
            _put(values, new, value(stored))

    return migrate


def removed(key: str, without: Any) -> Migration:
    """Return a migration for a removed knob `key`: the program now always behaves as with the value `without`.

    Another value stays, so a run that was begun with it is refused: `removed("rollout.eager", without=False)`.
    """

    def migrate(values: Values) -> None:
        if (stored := _pop(values, key)) not in (_ABSENT, without):
            _put(values, key, stored)

    return migrate


def _forget_limits(values: Values) -> None:
    """Drop the knobs of `LIMITS`; a star is any name."""
    for key in LIMITS:
        *path, name = key.split(".")
        for section in _sections(values, path):
            section.pop(name, None)


def changed(key: str, value: Callable[[Any], Any]) -> Migration:
    """Return a migration that converts old values of the knob or section `key` with `value`.

    Use it only if no old value is a valid new one. It also works for a section of several forms:
    `changed("problems.train", …)`.
    """
    return renamed(key, key, value)


def _kl(section: Any) -> Any:
    """Convert a section in which `place: none` meant no penalty, whatever the other knobs were."""
    return {} if isinstance(section, dict) and section.get("place") == "none" else section


def _evaluation(section: Any) -> Any:
    """Convert a section in which `temperature: 0` made all `samples` greedy."""
    greedy = isinstance(section, dict) and section.get("temperature") == 0
    return {**section, "samples": 0, "temperature": 1.0} if greedy else section


def _objective(values: Values) -> None:
    """Make one choice of two: without recomputed logprobs the decoupled objective was plain PPO, too."""
    stored = [_pop(values, "ppo.use_decoupled_loss"), _pop(values, "ppo.recompute_logprob")]
    if stored != [_ABSENT, _ABSENT]:
        _put(values, "ppo.objective", "behaviour" if False in stored else "decoupled")


def _parallel_sizes(values: Values) -> None:
    """Make knobs of vLLM's sizes in `inference.extra_args`. Copies of the weights in one server become more servers."""
    arguments = _get(values, "inference.extra_args")
    if not isinstance(arguments, list):
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    knobs = {"tensor": "tensor_parallel", "pipeline": "pipeline_parallel", "data": "replicas"}
    for kind, knob in knobs.items():
        names = [f"--{kind}-parallel-size", f"--{kind}_parallel_size", f"-{kind[0]}p"]
        parser.add_argument(*names, dest=knob, type=int)
    try:
        sizes, others = parser.parse_known_args([str(argument) for argument in arguments])
    except argparse.ArgumentError:  # refused when the values are read
        return
    for knob, size in vars(sizes).items():
        if size is not None:
            before = _get(values, f"inference.{knob}")
            _put(values, f"inference.{knob}", size * (before if isinstance(before, int) else 1))
            _put(values, "inference.extra_args", others)


def _folder(path: Any) -> Any:
    """Convert the empty path, which meant the current folder of the command."""
    return "." if path == "" else path


def _processes(values: Values) -> None:
    """Give each of `rollout.processes` workers its fraction of what were numbers of the whole host."""
    count = _pop(values, "rollout.processes")
    if not isinstance(count, int) or count == 1:
        return
    _put(values, "cluster.workers_per_node", count)
    for key in ("inference.replicas", "rollout.concurrency", "score.workers"):
        whole = _get(values, key)
        if isinstance(whole, int):
            _put(values, key, max(1, whole // count))


def _trainer(section: Any) -> Any:
    """Convert a section with ways to start ranks besides Ray, which may change while a run lasts."""
    if not isinstance(section, dict):
        return section
    kept = {name: value for name, value in section.items() if name not in ("launcher", "hosts", "address")}
    return kept | ({"on_cluster": True} if section.get("launcher") == "ray" else {})


def _address(args: Any) -> Any:
    """Forget the Unix socket that an agent's endpoint listened on: it listens on a free port of this host instead."""
    if not isinstance(args, dict) or not str(args.get("listen")).startswith("unix:"):
        return args
    return {name: value for name, value in args.items() if name != "listen"}


def _algorithm(values: Values) -> None:
    """Divide the section `ppo` of the only algorithm that there was into `algorithm` and `train`."""
    section = _pop(values, "ppo")
    if not isinstance(section, dict):
        if section is not _ABSENT:
            values["algorithm"] = section  # refused when the values are read
        return
    for name in _OF_TRAIN:
        if name in section:
            _put(values, f"train.{name}", section.pop(name))
    if "ppo_n_minibatches" in section:
        _put(values, "train.minibatches", section.pop("ppo_n_minibatches"))
    values["algorithm"] = {"type": "ppo", **section}


MIGRATIONS: Sequence[Migration] = (
    renamed("ppo.minibatches", "ppo.ppo_n_minibatches"),
    renamed("ppo.behaviour_weight_cap", "ppo.behaviour_weight.cap"),
    changed("ppo.kl", _kl),
    changed("evaluation", _evaluation),
    changed("storage.root", _folder),
    changed("storage.cache", _folder),
    changed("trainer", _trainer),
    changed("agent.args", _address),
    # The only default there was; the one that follows the number format is the same in float32.
    changed("inference.canary_tolerance", lambda stored: None if stored == FLOAT32_TOLERANCE else stored),
    _objective,
    _forget_limits,
    renamed("trainer", "train"),
    _algorithm,
    *(removed(key, without=value) for key, value in FIXED.items()),
    _processes,
    _parallel_sizes,
    renamed("cluster.start_timeout_s", "cluster.startup_timeout_s"),
)
"""All migrations, oldest first. None is ever removed, because old stores still exist."""

BEFORE: Mapping[str, Any] = {
    "algorithm.advantage.baseline": "turn",
    "algorithm.advantage.bound": None,
    "algorithm.advantage.credit": "order",
    "algorithm.advantage.scale_penalties": True,
    "algorithm.behaviour_weight.cap": None,
    "algorithm.c_clip": None,
    "algorithm.ratio_to": "sampling",
    "problems.shares": "draws",
    "problems.without_room": "play",
    "retrain.gate.max_by_luck": None,
    "reward.failed": "least",
    "reward.max_clip": 20.0,
    "reward.shape": "success",
    "reward.unfinished": "leave-out",
    "rollout.allow_own_sampling": True,
    "score.reading": "library",
    "score.success": "reward",
    "score.tries": "sum",
    "storage.keep": None,
}
"""Knobs whose default is another behaviour than that of the programs before the knob, and the value for the latter."""


def up_to_date(values: Values, migrations: Sequence[Migration] = MIGRATIONS) -> Values:
    """Convert a stored configuration to this program's schema; knobs and values that it does not know stay in it.

    >>> up_to_date({"ppo": {"minibatches": 2}})["train"]["minibatches"]
    2
    """
    values = copy.deepcopy(values)
    for migrate in migrations:
        migrate(values)
    for key in _before(values):
        _put(values, key, BEFORE[key])
    return _filled(Config, values)


def as_begun(config: Config, begun: Values) -> Config:
    """Return the configuration of a run that continues: knobs of `BEFORE` that it does not set stay as the run `begun`.

    So a run that was begun by an older program continues as it began, with the YAML file that it was begun with.
    """
    given = config.model_dump(mode="json", exclude_unset=True)
    return Config.model_validate(with_knobs(given, begun, _before(given)))


def _before(values: Values) -> list[str]:
    """Return the keys of `BEFORE` that a configuration does not set, and that its algorithm has."""
    kind = _get(values, "algorithm.type")
    own = section_of(Config.model_fields["algorithm"].annotation, {"type": "ppo" if kind is _ABSENT else kind})
    known = {f"algorithm.{name}" for name in (own or OwnAlgorithm).model_fields}
    keys = [key for key in BEFORE if not key.startswith("algorithm.") or ".".join(key.split(".")[:2]) in known]
    return [key for key in keys if _get(values, key) is _ABSENT]


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
    """Remove and return the value at a dotted key; `_ABSENT` if there is none."""
    *path, name = key.split(".")
    return next((section.pop(name, _ABSENT) for section in _sections(values, path)), _ABSENT)


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
