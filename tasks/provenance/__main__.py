"""Answers what was trained on what, and excludes from training what turned out to be wrong.

python -m tasks.provenance trained-on 12+7
python -m tasks.provenance --root s3://bucket/prefix impact 12+7
"""

from storage import interrupts
from storage.commands.program import Program

COMMANDS = {
    "trained-on": "which checkpoints were trained on a problem, directly or by descent",
    "training-data": "what a checkpoint and all before it were trained on, problem by problem",
    "impact": "what a wrong gold answer of a problem affects: trajectories, evaluations, checkpoints, aliases",
    "exclude": "make a version that keeps a problem, or trajectories, out of training",
}
PROGRAM = Program(
    name="python -m tasks.provenance",
    about=(__doc__ or "").splitlines()[0],
    epilog="PROBLEM: an id, a key (32 digits, of prompt and solutions) or, with --prompt, a part of the prompt.",
    package="tasks.provenance.commands",
    commands=COMMANDS,
    cached=True,
)


def main() -> int:
    """Command line. Status 0, 1 for an error, 2 for a wrong command."""
    return PROGRAM.main()


if __name__ == "__main__":
    interrupts.run(main)
