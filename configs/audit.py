"""The knobs of the audit: each check with its threshold and the severity of a value above it."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from configs.knobs import Knobs, NonNegativeFloat, NonNegativeInt


class CheckKnobs(Knobs):
    """The knobs of one check.

    Example: `audit.checks.truncated={threshold: 0.5}`, or `audit.checks.truncated.severity=ignore`.
    """

    threshold: NonNegativeFloat
    """A larger value raises the alarm."""
    severity: Literal["ignore", "warn", "fail"]
    """Effect of an alarm on the whole audit; `ignore` skips the check."""


def _fail(threshold: float = 0.0) -> CheckKnobs:
    return CheckKnobs(threshold=threshold, severity="fail")


def _warn(threshold: float) -> CheckKnobs:
    return CheckKnobs(threshold=threshold, severity="warn")


class Checks(Knobs):
    """The checks by name. The value of a check is its number of cases, unless its sentence names a share or another
    quantity.
    """

    # integrity
    damaged_objects: CheckKnobs = _fail()
    """Objects that are missing, or whose size or hash differs from the manifest."""
    wrong_schema: CheckKnobs = _fail()
    """Files that are not Parquet, or have a newer or another schema."""
    broken_parents: CheckKnobs = _fail()
    """Parents that are missing or changed, and rows that name another policy or problem set than the manifest."""
    duplicate_ids: CheckKnobs = _fail()
    """Rows with the id of another row."""
    unscored_turns: CheckKnobs = _fail()
    """Turns without a score."""
    orphan_scores: CheckKnobs = _fail()
    """Scores of turns that do not exist, and second scores of one turn."""
    # tokens
    mask_and_spans: CheckKnobs = _fail()
    """Rows whose mask is not exactly the spans of their turns, or whose columns differ in length."""
    broken_prefix: CheckKnobs = _fail()
    """Rows in which a turn does not continue the tokens before it or follows none that exists, or whose group began
    with another prompt."""
    bad_logprobs: CheckKnobs = _fail()
    """Rows with a logprob that is not finite, is above 0, or is outside of the mask."""
    falling_versions: CheckKnobs = _fail()
    """Rows with a turn in which the policy version falls, is unknown, or is newer than the data set allows."""
    text_differs: CheckKnobs = _fail()
    """Turns whose tokens decode to another text than the stored one."""
    template_drift: CheckKnobs = _warn(0)
    """Number of different prompt templates around the problem in one run, not counting the first, and of turns whose
    feedback is not in the tokens that follow."""
    # policy
    logprob_drift: CheckKnobs = _fail(0.001)
    """Mean difference between stored logprobs and those recomputed with the stored weights, in nats per token, beyond
    what the number format of the engine explains: 1.5 times the difference that it makes when the same tokens are
    recomputed in it. Float32 gives 1e-5."""
    staleness: CheckKnobs = _fail()
    """Tokens sampled by a policy that is older than `rollout.max_head_offpolicyness` allows."""
    # learning
    success_drift: CheckKnobs = _warn(5.0)
    """Change of the first turn's success from one data set of a run to the next, in standard errors over problems;
    changes below 0.1 do not count."""
    broken_answers: CheckKnobs = _warn(0.1)
    """Share of right answers that were followed by a wrong one."""
    zero_variance: CheckKnobs = _warn(0.9)
    """Share of groups in which each turn earned the same in all episodes, so that nothing is learned from them."""
    identical_answers: CheckKnobs = _warn(0.2)
    """Share of groups in which all first answers are the same text, and that text is long or wrong."""
    repeated_seeds: CheckKnobs = _warn(0)
    """Turns sampled with the same seed as the same turn of another episode of their group."""
    length_and_reward: CheckKnobs = _warn(0.6)
    """Absolute correlation of length and success within groups."""
    # episodes
    truncated: CheckKnobs = _warn(0.2)
    """Share of episodes that a token limit cut."""
    failed: CheckKnobs = _warn(0.05)
    """Share of episodes that failed or exceeded their deadline."""
    loops: CheckKnobs = _warn(0.01)
    """Share of turns that repeat themselves: turns of 32 tokens or more, most of whose 4-grams occurred before."""
    # tools
    tool_output_in_loss: CheckKnobs = _fail()
    """Outputs of calls that stand among the sampled tokens, so that the policy is trained to invent them."""
    unanswered_calls: CheckKnobs = _warn(0.1)
    """Share of calls that got no output."""
    unparsable_calls: CheckKnobs = _warn(0.1)
    """Share of calls that cannot be read."""
    tool_errors: CheckKnobs = _warn(0.3)
    """Share of a tool's calls that failed; tools with fewer than 20 calls in a data set do not count."""
    repeated_calls: CheckKnobs = _warn(0.05)
    """Share of episodes with calls in which one conversation has the same call 3 times or more."""
    leaked_by_tool: CheckKnobs = _fail()
    """Calls whose output gives the gold answer away, as far as that can be told from a tool that computes it."""
    # verdicts
    unparsable: CheckKnobs = _warn(0.2)
    """Share of turns in which no answer was found."""
    verdict_failures: CheckKnobs = _warn(0.02)
    """Share of verdicts that are timeouts or errors."""
    verdicts_disagree: CheckKnobs = _fail()
    """Turns whose verdicts by environment and score differ, and answers graded both right and wrong."""
    false_negatives: CheckKnobs = _warn(0.05)
    """Share of `wrong` verdicts that a second checker calls right: the lower end of its interval."""
    false_positives: CheckKnobs = _warn(0.05)
    """Share of `correct` verdicts that a second checker calls wrong: the lower end of its interval."""
    repeated_question: CheckKnobs = _fail(0.05)
    """Share of right answers that hold no number beyond the question's, where the gold answer is another number."""
    # problems
    leaked_answers: CheckKnobs = _fail()
    """Prompts that state the gold answer, and feedback that reveals it."""
    unmatched_gold: CheckKnobs = _fail()
    """Gold answers that the verifier does not accept even as their own answer."""
    never_solved: CheckKnobs = _warn(0)
    """Problems never solved while at least half of the episodes agree on another answer: the gold may be wrong."""
    contamination: CheckKnobs = _fail()
    """Training problems that are also in an evaluation set of the run."""
    # text
    secrets: CheckKnobs = _fail()
    """Turns or prompts with text that looks like a key or a password."""
    personal_data: CheckKnobs = _warn(0)
    """Turns or prompts with text that looks like an address, a telephone number or a card number."""
    hidden_characters: CheckKnobs = _warn(0)
    """Turns or prompts with characters that reorder or hide text: bidi controls, zero width, other controls."""

    @model_validator(mode="before")
    @classmethod
    def _partial(cls, values: Any) -> Any:
        """Fill in the declared threshold or severity of each check that sets only one of them."""
        if not isinstance(values, dict):
            return values
        declared = {name: field.default.model_dump() for name, field in cls.model_fields.items()}
        return {
            name: {**declared.get(name, {}), **given} if isinstance(given, dict) else given
            for name, given in values.items()
        }


class Audit(Knobs):
    """The audit of trajectory data sets."""

    checks: Checks = Checks()
    """The checks and their thresholds."""
    judged_again: PositiveInt = 2000
    """Number of verdicts of each kind that the second checker grades again."""
    least_judged: ClassVar[float] = 0.5
    """A check that could decide a smaller share of its sample warns, and shows the cases that it could not decide."""
    recomputed: NonNegativeInt = 64
    """Number of trajectories whose logprobs are recomputed with the policy that played them; 0: no model is loaded."""
    recomputed_sets: ClassVar[int] = 3
    """Number of data sets, from the first to the last, from which these are taken; the policy of each is loaded."""
    least_episodes: ClassVar[int] = 16
    """A problem with fewer episodes than this does not count as never solved."""
    examples: PositiveInt = 5
    """Number of cases of each check that the report shows in full; it only names the others."""
    memory_gib: Annotated[float, Field(gt=0, lt=1e16)] = 2.0
    """Memory of the database; data that need more go to a temporary folder."""
