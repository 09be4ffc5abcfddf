"""Show trajectories in the browser, with the cases that an audit found; import and compare data sets.

python -m tasks.audit read demo
python -m tasks.audit --root s3://bucket/prefix read audits/1f0c4a7be23d5566
"""

from storage import interrupts
from storage.commands.program import Command, Program
from tasks.audit import comparing
from tasks.audit.importing import command
from tasks.audit.reader import read

PROGRAM = Program(
    name="python -m tasks.audit",
    about=(__doc__ or "").splitlines()[0],
    epilog="python -m tasks.provenance reports which checkpoint was trained on which problem, and excludes problems.",
    commands={
        "read": Command(
            "browse trajectories: filters, conversations, tokens, groups, and the cases of an audit",
            read.add_arguments,
            read.run,
        ),
        "import": Command("make data sets of the rollouts of another program", command.add_arguments, command.run),
        "compare": Command("compare two data sets on the same problems", comparing.add_arguments, comparing.run),
    },
    cached=True,
)
main = PROGRAM.main


if __name__ == "__main__":
    interrupts.run(main)
