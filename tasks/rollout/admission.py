"""Checks of an agent's observations, before the engine gets them, and of its trajectories, before they are stored.

They check everything that vLLM, Arrow or training could refuse later, because a refusal by vLLM would end the rollout.
A refused value fails only its episode; the reason says what was wrong and what to do.
"""

import dataclasses
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from numbers import Real
from operator import attrgetter
from typing import Any, get_type_hints

import numpy as np
from pydantic import ConfigDict, ValidationError, create_model

from configs.rollout import Rollout
from storage.records import HIGHEST_LOGPROB, LAST_TURN_CUT, LOWEST_LOGPROB, Fault, Trajectory, Turn
from tasks.inference.api import Completion, GenerationConfig, Observation
from tasks.train.returns import in_order

MOST_COMPLETIONS = 256
"""Most completions of one observation."""

LONGEST_TEXT = 1_000_000
"""Most characters of a text in a record."""
MOST_TOKENS = 4_000_000
"""Most tokens of a trajectory."""

_IDENTITY = (
    *("trajectory_id", "run", "iteration", "problem_id", "sample", "prompt", "solutions", "problem_set", "policy"),
    *("policy_version", "agent", "agent_args", "environment", "environment_args", "seed", "source", "metadata"),
    "experts",
)
"""Columns that say which episode it is; the others are the agent's own."""
_OF_TOKENS = ("action_mask", "logprobs", "versions")
"""Columns with a value for each token, besides the ids."""
_OF_TURNS = ("follows", "limits", "received", "asked", "paid", "answers", "reward_parts")
"""Columns with a value for each turn, or none."""
_OWN: dict[str, Any] = {
    name: (kind, ...) for name, kind in get_type_hints(Trajectory, include_extras=True).items() if name not in _IDENTITY
}
"""The agent's own columns, with their types."""
_CHECKED = create_model(
    "Trajectory",
    __config__=ConfigDict(strict=True, revalidate_instances="always", str_max_length=LONGEST_TEXT),
    **_OWN,
)
"""Checks that all values have exactly the types of the record: Arrow would refuse or convert others."""
_identity, _own = attrgetter(*_IDENTITY), attrgetter(*_OWN)


class RefusedError(ValueError):
    """An invalid observation or return value of an agent; the message says what was wrong and what to do."""


def check_observation(observation: Any) -> Observation:
    """Check the form of what an agent put on its observation queue.

    Raises:
        RefusedError: it is no observation.
    """
    if not isinstance(observation, tuple) or len(observation) != 3 or not isinstance(observation[0], str):
        raise RefusedError(f"obs_queue got {shown(observation)}: put (qid, token_ids, gconfig) on it, prompt.qid first")
    return observation


def check_request(
    token_ids: Any, gconfig: Any, vocabulary: int, settings: Rollout, sampling: GenerationConfig | None
) -> tuple[list[int], GenerationConfig]:
    """Check a request and return it with its ids copied. The engine itself refuses a prompt that is too long.

    Args:
        token_ids: the prompt.
        gconfig: how to sample.
        vocabulary: number of token ids that the policy knows.
        settings: whether it may sample from another distribution, or leave out tokens of it by a schema.
        sampling: what the agent was given, whose distribution it must sample from otherwise; None: any.

    Raises:
        RefusedError: the engine could not answer it.
    """
    if not isinstance(gconfig, GenerationConfig):
        raise RefusedError(f"the gconfig of an observation is {shown(gconfig)}: give a GenerationConfig")
    if gconfig.n > MOST_COMPLETIONS:
        raise RefusedError(f"gconfig.n={gconfig.n}: ask for at most {MOST_COMPLETIONS} completions at once")
    for name in ("temperature", "top_p", "top_k") if sampling and not settings.allow_own_sampling else ():
        asked, given = (max(0, getattr(each, name)) for each in (gconfig, sampling))  # vLLM: -1 is 0
        if asked != given:
            # Training would take the logprobs for those of another distribution.
            remedy = "use dataclasses.replace(context.gconfig, …), or set rollout.allow_own_sampling=true"
            raise RefusedError(f"gconfig.{name}={asked:g}, but the run samples with {given:g}: {remedy}")
    check_ids("the token_ids of an observation", token_ids, vocabulary)
    if not token_ids:
        raise RefusedError("an observation has no token ids: give the ids of a prompt")
    check_ids("gconfig.stop_token_ids", list(gconfig.stop_token_ids), vocabulary)
    return list(token_ids), gconfig


def admit(
    returned: Any, record: Trajectory, vocabulary: int, served: Sequence[Completion], metadata: str | None = None
) -> list[Trajectory]:
    """Check the trajectories that an agent returned; return copies, which the agent can no longer change.

    Args:
        returned: the agent's return value.
        record: the episode's record.
        vocabulary: number of token ids that the policy knows.
        served: all completions that were sampled for this episode.
        metadata: the problem's, as the agent's prompt contained it; None: whole, as the record has it.

    Raises:
        RefusedError: the value is not a list of trajectories of this episode that can be stored and trained on.
    """
    if not isinstance(returned, list):
        raise RefusedError(f"the agent returned {shown(returned)}: return a list of trajectories, [] to reject")
    identity = [*_identity(record)]
    if metadata is not None:
        identity[_IDENTITY.index("metadata")] = metadata
    return [_admit(trajectory, identity, record, vocabulary, served) for trajectory in returned]


def _admit(
    returned: Any, identity: list[Any], record: Trajectory, vocabulary: int, served: Sequence[Completion]
) -> Trajectory:
    if not isinstance(returned, Trajectory):
        raise RefusedError(f"the agent returned a list with {shown(returned)}: it may hold trajectories only")
    for name, value, expected in zip(_IDENTITY, _identity(returned), identity, strict=True):
        if value != expected:
            raise RefusedError(f"a trajectory has {name}={shown(value)}: make it from prompt.record, and keep it")
    trajectory = dataclasses.replace(record, **_typed(returned))
    if trajectory.fault and trajectory.status not in ("truncated", "failed"):
        raise RefusedError(f"fault={trajectory.fault!r}: only a truncated or failed episode has one")
    _check_sampling(trajectory.sampling)
    _check_columns(trajectory, vocabulary)
    _check_served(trajectory, served)
    _check_starts(trajectory)
    if not -1 <= trajectory.unplayed_turns < 2**31:
        raise RefusedError(f"unplayed_turns={trajectory.unplayed_turns}: give a number, or -1 for unknown")
    if not 0 <= trajectory.turn_discount <= 1:
        raise RefusedError(f"turn_discount={trajectory.turn_discount}: give a number from 0 to 1")
    for index, turn in enumerate(trajectory.turns):
        if turn.finish_reason not in ("stop", "length"):
            raise RefusedError(f"finish_reason of turn {index} is {turn.finish_reason!r:.80}: keep the completion's")
        if not -(2**63) <= turn.seed < 2**63:
            raise RefusedError(f"seed of turn {index} has more than 64 bits: keep that of the outputs")
    _check_columns_of_turns(trajectory)
    fault = trajectory.fault or _fault(trajectory)
    return dataclasses.replace(trajectory, fault=fault) if fault else trajectory


def _typed(row: Trajectory) -> dict[str, Any]:
    """Return copies of the agent's own columns, whose values have the record's types.

    Rewards and other numbers may be NumPy's, or truth values.
    """
    columns = dict(zip(_OWN, _own(row), strict=True))
    check_kinds("turns", columns["turns"], {Turn})
    check_kinds("reward_parts", columns["reward_parts"], {dict})
    columns["turns"] = [_with_floats(index, turn) for index, turn in enumerate(columns["turns"])]
    columns["reward_parts"] = [
        {name: number(f"part {name!r} of a reward", value) for name, value in named.items()}
        for named in columns["reward_parts"]
    ]
    columns["turn_discount"] = number("turn_discount", row.turn_discount)
    try:
        checked = _CHECKED(**columns)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        place = ".".join(map(str, detail["loc"]))
        raise RefusedError(f"{place} is {shown(detail['input'])}: {detail['msg']} (NumPy: .tolist())") from None
    return {**vars(checked)}


def _with_floats(index: int, turn: Turn) -> Turn:
    given = turn.reward, turn.latency_s
    reward, latency = number(f"reward of turn {index}", given[0]), number(f"latency_s of turn {index}", given[1])
    same = reward is given[0] and latency is given[1]
    return turn if same else dataclasses.replace(turn, reward=reward, latency_s=latency)


def _fault(trajectory: Trajectory) -> Fault:
    """Return whose fault it is that an agent's trajectory is not complete, where the agent does not say it."""
    if trajectory.status == "failed":
        return "set-up"
    ended = trajectory.unplayed_turns == 0 or trajectory.reason == LAST_TURN_CUT  # with the verdict on its last turn
    return "policy" if trajectory.status == "truncated" and not ended else ""


def _check_columns(trajectory: Trajectory, vocabulary: int) -> None:
    """Check that tokens, mask, logprobs and versions have one length and plain numbers, and agree with the turns."""
    ids, mask = trajectory.token_ids, trajectory.action_mask
    check_ids("token_ids", ids, vocabulary)
    for name in _OF_TOKENS:
        if len(column := getattr(trajectory, name)) != len(ids):
            raise RefusedError(f"{name} has {len(column)} values for {len(ids)} tokens: every token needs one")
    if mask != _spans(trajectory.turns, len(ids)):
        raise RefusedError("action_mask must be true for the turns' tokens and no others: use Episode.add_completion")
    if not any(mask) and trajectory.status in ("completed", "truncated"):
        raise RefusedError(f"{trajectory.status}, but without a sampled token: ask for completions, or return []")
    rows = zip(mask, trajectory.logprobs, trajectory.versions, strict=True)
    for index, (sampled, logprob, version) in enumerate(rows):
        if not sampled and (logprob != 0 or version != -1):
            raise RefusedError(f"token {index} was not sampled: give it the logprob 0.0 and version -1")
        if sampled and not LOWEST_LOGPROB <= logprob <= HIGHEST_LOGPROB:
            remedy = (
                "Keep the completion's; if it is so, the server is wrong: is its --logprobs-mode processed_logprobs?"
            )
            raise RefusedError(f"logprobs[{index}]={logprob}: sampled tokens have {LOWEST_LOGPROB} to 0. {remedy}")


def _check_served(trajectory: Trajectory, served: Sequence[Completion]) -> None:
    """Check that every turn is a completion of this episode, or its beginning: PPO relies on these logprobs."""
    for index, turn in enumerate(trajectory.turns):
        span, possible = slice(turn.start, turn.end), served
        for name in ("token_ids", "logprobs", "versions"):
            kept = getattr(trajectory, name)[span]
            possible = [completion for completion in possible if getattr(completion, name)[: len(kept)] == kept]
            if not possible:
                wanted = "a completion that this episode received, or its beginning"
                remedy = "make one turn of each completion and keep its values unchanged"
                raise RefusedError(f"the {name} of turn {index} do not match {wanted}: {remedy}")


def _spans(turns: Sequence[Turn], length: int) -> list[bool]:
    """Return the action mask that the turns define, and check that they do not overlap."""
    mask, begin = [False] * length, 0
    for index, turn in enumerate(turns):
        if not begin <= turn.start <= turn.end <= length:
            span = f"token_ids[{turn.start}:{turn.end}]"
            raise RefusedError(f"turn {index}, {span}, overlaps the turn before or ends after the {length} tokens")
        mask[turn.start : turn.end] = [True] * (turn.end - turn.start)
        begin = turn.end
    return mask


def _check_starts(trajectory: Trajectory) -> None:
    starts = trajectory.sequence_starts
    rising = starts[:1] == [0] and all(a < b for a, b in pairwise([*starts, max(len(trajectory.token_ids), 1)]))
    if not rising or any(trajectory.action_mask[start] for start in starts if trajectory.token_ids):
        raise RefusedError(f"sequence_starts={starts!s:.80}: begin with 0, rise, and begin each one with a prompt")


def _check_columns_of_turns(trajectory: Trajectory) -> None:
    """Check the columns that name turns of this trajectory or have a value for each, and that they are possible."""
    count = len(trajectory.turns)
    for name in _OF_TURNS:
        if len(values := getattr(trajectory, name)) not in (0, count):
            raise RefusedError(f"{name} has {len(values)} values for {count} turns: give one each, or []")
    named = {"turn of a call": [call.turn for call in trajectory.calls], "ungraded": trajectory.ungraded}
    for name, turns in {**named, "follows": trajectory.follows}.items():
        least = -1 if name == "follows" else 0
        if not all(least <= turn < count for turn in turns):
            raise RefusedError(f"{name} names a turn that the trajectory, of {count}, does not have: {turns!s:.80}")
    try:
        TopologicalSorter({turn: [before] for turn, before in enumerate(trajectory.follows)}).prepare()
    except CycleError as error:
        raise RefusedError(f"follows: turns follow each other in a circle, {error.args[1]!s:.80}") from None
    if not all(0 < limit < 2**31 for limit in trajectory.limits):
        raise RefusedError(f"limits={trajectory.limits!s:.80}: give numbers above 0")
    if not in_order(trajectory):
        order = ", ".join(f"{name}={getattr(trajectory, name)!s:.80}" for name in ("received", "asked", "paid"))
        raise RefusedError(f"{order} is not possible: count the completions that the agent had, or give no column")


@lru_cache(maxsize=16)  # nearly all trajectories of a run have the same
def _check_sampling(sampling: str) -> None:
    parameters = None
    with suppress(ValueError):
        parameters = json.loads(sampling)
    if not isinstance(parameters, dict) or type(parameters.get("max_new_tokens")) is not int:
        raise RefusedError(f"sampling={shown(sampling)}: keep that of prompt.record, or give JSON with all its keys")


def check_ids(name: str, ids: Any, vocabulary: int) -> None:
    check_kinds(name, ids, {int})
    if len(ids) > MOST_TOKENS:
        raise RefusedError(f"{name}: {len(ids):,} tokens are too many, a record has at most {MOST_TOKENS:,}")
    if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
        strange = next(number for number in ids if not 0 <= number < vocabulary)
        raise RefusedError(f"{name}: the policy has no token {strange}, only 0 to {vocabulary - 1}")


def check_kinds(name: str, values: Any, kinds: set[type]) -> None:
    """Check that `values` is a list with values of exactly these types: Arrow would refuse or convert others."""
    if type(values) is not list:
        raise RefusedError(f"{name}: {shown(values)} is not a list")
    if strange := set(map(type, values)) - kinds:
        expected = " or ".join(sorted(kind.__name__ for kind in kinds))
        actual = ", ".join(sorted(kind.__name__ for kind in strange))
        raise RefusedError(f"{name} holds values of type {actual}, not {expected}: convert them (numpy: .tolist())")


def number(name: str, value: Any) -> float:
    if isinstance(value, np.bool_):  # not a number to Python, unlike its own bool
        value = bool(value)
    # Neither NaN nor what is infinite as float32. The abstract class has no `<`.
    if not (isinstance(value, Real) and -3e38 < value < 3e38):  # type: ignore[operator]
        raise RefusedError(f"{name} is {shown(value)}: give a finite number")
    return float(value)


def shown(value: Any) -> str:
    """Return a value as text for a message: its beginning if it is plain, otherwise its type."""
    plain = value is None or isinstance(value, str | int | float)
    return f"{value!r:.80}" if plain else f"a value of type {type(value).__name__}"
