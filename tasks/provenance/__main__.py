"""Report which checkpoint was trained on which problem, and exclude wrong problems or trajectories from training.

python -m tasks.provenance trained-on 12+7
python -m tasks.provenance --root s3://bucket/prefix impact 12+7
"""

from storage import interrupts
from storage.commands.program import Program
from tasks.provenance.commands import COMMANDS

PROGRAM = Program(
    name="python -m tasks.provenance",
    about=(__doc__ or "").splitlines()[0],
    epilog="PROBLEM: an id, a key (32 hex digits of its content) or, with --prompt, a part of the prompt.",
    commands=COMMANDS,
    cached=True,
)
main = PROGRAM.main


if __name__ == "__main__":
    interrupts.run(main)
