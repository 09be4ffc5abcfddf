"""Problem sets, and which of their problems a run draws how often.

`task` (Prefect) imports sets and commits them by their `fingerprint`, so each set is stored once. `load_problems`
(`load`) reads a source: `arithmetic`, `files` (with `lines`), or `hub`; `presets` converts its rows with `columns` and
`messages`, and `problem_set` checks them. `repeats` finds problems that ask the same, `contamination` training problems
in evaluation sets. `difference` compares and joins sets.
`history` counts the results of past runs, and `curriculum` (`curriculum_task`) computes weights from them. `exclusions`
keeps trajectories and problems out of training.
"""

from tasks.problems.load import load_problems
from tasks.problems.problem_set import BadRow, ProblemError, ProblemSet, fingerprint

__all__ = ["BadRow", "ProblemError", "ProblemSet", "fingerprint", "load_problems"]
