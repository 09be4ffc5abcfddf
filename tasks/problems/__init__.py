"""Problem sets, and which of their problems a run draws how often.

The flows import sets and commit them by their `fingerprint`, so each set is stored once. `load_problems` (`sources`)
reads a source or has it `generated`; `rows` converts its rows to problems, and `problem_set` checks, compares and joins
sets. `mixture` makes one set of the problems of several members, and says whose turn it is
in each draw. `contamination` finds training problems in evaluation sets.
`curriculum` computes weights from the results of past runs. `exclusions` keeps trajectories and
problems out of training.
"""

from tasks.problems.problem_set import BadRow, ProblemError, ProblemSet, fingerprint
from tasks.problems.sources import load_problems

__all__ = ["BadRow", "ProblemError", "ProblemSet", "fingerprint", "load_problems"]
