"""The knobs of scores, and of the rewards that training makes of them."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from configs.knobs import Knobs, NonNegativeFloat, NonNegativeInt, Share, Workers, refuse_idle
from configs.models import Role

BY_MODEL: dict[str, Role] = {"judge": "judge", "reward-model": "reward"}
"""The scorers that ask a model beside the policy, with its role."""
VERDICTS = ("math-verify", "code")
"""The scorers whose rewards are verdicts: 1 or 0."""
LONGEST_VERDICT_S = 9e8
"""A tenth of the longest time that a thread can wait, because the pipeline waits ten times as long for a verifier."""


class Score(Knobs):
    type: str | dict[str, str] = "math-verify"
    """Scorer that gives stored turns their verdicts: a registered name (`math-verify`, `environment`, `code`,
    `judge`, `reward-model`), or `package.module:function` for your own. Or a mapping from the source of problems to
    such names: `{default: math-verify, code: code}`."""
    args: dict[str, dict[str, Any]] = {}
    """Keyword arguments by scorer, such as `{environment: {success_above: 0.5}}`; they are checked before anything
    starts."""
    group: bool = False
    """Show scorers of your own, and the prompt of `judge`, all episodes of the answer's problem (`Answer.group`): for
    the shortest right answer, diversity, or a judgement by comparison."""
    tries: Literal["last", "sum"] | None = None
    """Return of an episode whose answers were graded several times. last: the reward of its last answer, because each
    answer was another try at the same problem: a policy that is nearly right first, on purpose, gains nothing. sum: the
    sum of all rewards, for environments that pay steps, and for verdicts, of which each wrong one costs. Empty: `sum`
    for `math-verify`, `code` and `environment`, and `last` for all others, whose grades may be parts of the whole."""
    workers: Workers = 2
    """Number of verifier processes, which can be killed."""
    timeout_s: Annotated[float, Field(ge=1e-6, le=LONGEST_VERDICT_S)] = 5
    """An answer that needs more seconds of processor time counts as `timeout`; waiting for a busy machine does not
    count."""
    max_failure_share: Share = 0.05
    """A larger share of timeouts and errors stops the run."""

    @property
    def by_source(self) -> dict[str, str]:
        """The scorers by source of problems; `default` is for all other sources."""
        return self.type if isinstance(self.type, dict) else {"default": self.type}

    def of(self, source: str) -> str:
        """Return the scorer of the problems of a source."""
        return self.by_source.get(source, self.by_source["default"])

    def pays_last(self, source: str) -> bool:
        """Return whether only the last answer of an episode is paid (`tries`)."""
        return self.tries == "last" if self.tries else self.of(source) not in (*VERDICTS, "environment")

    @property
    def models(self) -> dict[Role, str]:
        """The models beside the policy that scorers ask, by role, with the scorer's name."""
        return {BY_MODEL[name]: name for name in sorted(set(self.by_source.values())) if name in BY_MODEL}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if "default" not in self.by_source:
            raise ValueError(f"type={self.type!r} names no scorer for other sources: add default: math-verify")
        return self


class Reward(Knobs):
    """The reward of each turn in training: r = clip((x - bias) * scaling - overlong, ±max_clip), x from the score.

    A turn that answers nothing, such as a call of a tool, has only the penalty for its length: r = clip(-overlong).
    """

    shape: Literal["success", "raw"] | None = None
    """success: x = (reward - 0.5) * 2, so that rewards of 0 and 1 become -1 and 1. raw: x is the reward as the scorer
    gave it. Empty: `success` where `score.type` is `math-verify` or `code`, whose rewards are verdicts, and `raw` for
    all others."""
    least: float | None = None
    """The least reward in the scorer's units, such as -1 (with shape `raw` only; with `success` it is that of a wrong
    answer). An episode that the policy's own behaviour ended without an answer earns it (`tasks/train/returns.py`), and
    so does an answer that meets `score.timeout_s` or the limit of memory. Empty: the lowest of the update's scores, or
    0 if none is below 0."""
    bias: float = 0.0
    """Subtracted from x."""
    scaling: PositiveFloat = 1.0
    """Factor that multiplies the result after the bias."""
    max_clip: PositiveFloat | None = None
    """Largest absolute reward; empty: no limit. `reward/clipped_share` in the metrics says how many reach it."""
    overlong_tokens: NonNegativeInt = 0
    """Number of tokens before `sampling.max_new_tokens` over which the penalty for length rises from 0 to its full
    size, and fewer in proportion where a request had a lower limit; 0: no penalty."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Full size of the penalty for length, at the limit."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.overlong_tokens == 0:
            refuse_idle(self, "overlong_penalty", why="without overlong_tokens")
        if self.shape == "success":
            refuse_idle(self, "least", why="without shape=raw")
        return self

    def shape_of(self, scorer: str) -> Literal["success", "raw"]:
        """Return the shape of the rewards of a scorer."""
        return self.shape or ("success" if scorer in VERDICTS else "raw")
