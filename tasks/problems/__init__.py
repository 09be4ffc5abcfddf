"""Problem sets: arithmetic made here, JSONL and Parquet files, and Hugging Face data sets.

`load_problems` turns a source of the configuration into checked `Problem` rows; `fingerprint` names
them, so that a set is imported once and every trajectory can say which problems it was made from.
"""

from tasks.problems.load import load_problems
from tasks.problems.problem_set import BadRow, ProblemError, ProblemSet, fingerprint

__all__ = ["BadRow", "ProblemError", "ProblemSet", "fingerprint", "load_problems"]
