"""The knobs of the audit: each check with its threshold and what becomes of a data set that passes it."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from configs.knobs import Knobs, NonNegativeFloat, NonNegativeInt


class CheckKnobs(Knobs):
    """`audit.checks.truncated={threshold: 0.5}`, or `audit.checks.truncated.severity=ignore`."""

    threshold: NonNegativeFloat
    """A larger value raises the alarm."""
    severity: Literal["ignore", "warn", "fail"]
    """What an alarm means for the whole audit; `ignore` leaves the check out."""


def _fail(threshold: float = 0.0) -> CheckKnobs:
    return CheckKnobs(threshold=threshold, severity="fail")


def _warn(threshold: float) -> CheckKnobs:
    return CheckKnobs(threshold=threshold, severity="warn")


class Checks(Knobs):
    """By name. A value is a number of cases, unless it is said to be a share or something else."""

    # integrity
    damaged_objects: CheckKnobs = _fail()
    """Objects that are missing, whose size or hash is not the manifest's, or that no manifest names."""
    wrong_schema: CheckKnobs = _fail()
    """Files that are no Parquet, or of a newer or another schema."""
    broken_parents: CheckKnobs = _fail()
    """Parents that are missing or changed, and rows that name another policy or problem set than the manifest."""
    duplicate_ids: CheckKnobs = _fail()
    """Rows with the id of another row."""
    unscored_turns: CheckKnobs = _fail()
    """Turns without a score."""
    orphan_scores: CheckKnobs = _fail()
    """Scores of no turn, and second scores of one."""
    # tokens
    mask_and_spans: CheckKnobs = _fail()
    """Rows whose mask is not exactly the spans of their turns, or whose columns differ in length."""
    broken_prefix: CheckKnobs = _fail()
    """Rows in which a turn does not continue what stands before it, or whose group began with another prompt."""
    bad_logprobs: CheckKnobs = _fail()
    """Rows with a logprob that is not finite, above 0, or beside the mask."""
    falling_versions: CheckKnobs = _fail()
    """Rows with a turn in which the policy version falls, is unknown, or newer than the data set allows."""
    text_differs: CheckKnobs = _fail()
    """Turns whose tokens decode to another text than the stored one."""
    template_drift: CheckKnobs = _warn(0)
    """Forms of the prompt around the problem, within one run, beyond the first."""
    # policy
    logprob_drift: CheckKnobs = _fail(0.001)
    """Mean difference between stored logprobs and those recomputed with the stored weights, in nats a token, beyond
    what rounding explains: 0.02 where the served weights were bfloat16, 0.005 with float16. Float32 gives 1e-5."""
    staleness: CheckKnobs = _fail()
    """Tokens of a policy older than `rollout.max_head_offpolicyness` allowed."""
    # learning
    success_drift: CheckKnobs = _warn(5.0)
    """Step of the first turn's success from one data set to the next of a run, in standard errors over problems; steps
    below 0.1 do not count."""
    broken_answers: CheckKnobs = _warn(0.1)
    """Share of right answers that were followed by a wrong one."""
    zero_variance: CheckKnobs = _warn(0.9)
    """Share of groups in which all episodes earned the same: nothing is learned from them."""
    identical_answers: CheckKnobs = _warn(0.2)
    """Share of groups in which all first answers are the same text, and long, or wrong."""
    repeated_seeds: CheckKnobs = _warn(0)
    """Turns sampled with the seed of the same turn of another sample of their group."""
    length_and_reward: CheckKnobs = _warn(0.6)
    """Correlation of length and success within groups, with either sign."""
    # episodes
    truncated: CheckKnobs = _warn(0.2)
    """Share of episodes that a token limit cut."""
    failed: CheckKnobs = _warn(0.05)
    """Share of episodes that failed or came over their deadline."""
    loops: CheckKnobs = _warn(0.01)
    """Share of turns that repeat themselves: of 32 tokens or more, with most of their 4-grams seen before."""
    # verdicts
    unparsable: CheckKnobs = _warn(0.2)
    """Share of turns in which no answer was found."""
    verdict_failures: CheckKnobs = _warn(0.02)
    """Share of verdicts that are timeouts or errors."""
    verdicts_disagree: CheckKnobs = _fail()
    """Turns about which environment and score differ, and answers that were judged right and wrong."""
    false_negatives: CheckKnobs = _warn(0.05)
    """Share of `wrong` that a second checker calls right: the lower end of its interval."""
    false_positives: CheckKnobs = _warn(0.05)
    """Share of `correct` that a second checker calls wrong: the lower end of its interval."""
    # problems
    leaked_answers: CheckKnobs = _fail()
    """Prompts that state the gold answer, and feedback that gives it away."""
    unmatched_gold: CheckKnobs = _fail()
    """Gold answers that do not even match themselves."""
    never_solved: CheckKnobs = _warn(0)
    """Problems that nobody solved while most episodes agreed on another answer: the gold may be wrong."""
    contamination: CheckKnobs = _fail()
    """Problems that stand in an evaluation set of the run, too."""
    # text
    secrets: CheckKnobs = _fail()
    """Turns or prompts with what looks like a key or a password."""
    personal_data: CheckKnobs = _warn(0)
    """Turns or prompts with what looks like an address, a telephone or a card number."""
    hidden_characters: CheckKnobs = _warn(0)
    """Turns or prompts with characters that reorder or hide text: bidi controls, zero width, other controls."""

    @model_validator(mode="before")
    @classmethod
    def _partial(cls, values: Any) -> Any:
        """What is not said of a check stays as it is declared."""
        if not isinstance(values, dict):
            return values
        declared = {name: field.default.model_dump() for name, field in cls.model_fields.items()}
        return {
            name: {**declared.get(name, {}), **given} if isinstance(given, dict) else given
            for name, given in values.items()
        }


class Audit(Knobs):
    """Of trajectory data sets."""

    checks: Checks = Checks()
    """What is looked for."""
    judged_again: PositiveInt = 2000
    """Verdicts of each kind that the second checker looks at."""
    recomputed: NonNegativeInt = 64
    """Trajectories whose logprobs are recomputed with the policy that played them; 0: no model is loaded."""
    recomputed_sets: PositiveInt = 3
    """Data sets, from the first to the last, that these are taken from; each has its policy loaded."""
    least_episodes: PositiveInt = 16
    """A problem with fewer episodes is not called never solved."""
    examples: PositiveInt = 5
    """Cases of each check that the report shows whole; the rest it names."""
    memory_gib: Annotated[float, Field(gt=0, lt=1e16)] = 2.0
    """Of the database; what needs more goes to a temporary folder."""
