"""The workloads, as overrides of the demo's configuration, from which both sides take their settings."""

from dataclasses import dataclass

TRAINED, RANDOM = 1000, 1
"""Steps of the warm start. The demo's policy knows some arithmetic; after one step, a policy stops at random."""
STEPS = {TRAINED: "the demo's policy", RANDOM: "a policy that stops at random"}
TO_THE_END = "agent.args.stop_on_success=false"
"""TRL's environments cannot end an episode: every episode has all its turns, here as well."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One round is 32 problems x 16 episodes and two optimizer steps, as in the demo."""

    name: str
    what: str
    policy: int  # steps of its warm start
    overrides: tuple[str, ...]
    warm_up: int  # rounds at the beginning of each process that are not counted
    rounds: int  # rounds that are counted


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("short", "one turn, answers of about 6 tokens", TRAINED, ("agent.args={num_turns: 1}",), 3, 12),
        Workload(
            "random",
            "one turn, random lengths to 256 tokens",
            RANDOM,
            ("agent.args={num_turns: 1}", "sampling.max_new_tokens=256", "inference.max_model_len=320"),
            1,
            2,
        ),
        Workload("two-turn", "two turns with feedback", TRAINED, ("agent.args.num_turns=2", TO_THE_END), 3, 10),
        Workload(
            "five-turn",
            "five turns of random lengths to 64 tokens each",
            RANDOM,
            ("agent.args.num_turns=5", TO_THE_END, "sampling.max_new_tokens=64", "inference.max_model_len=512"),
            1,
            2,
        ),
    )
}
