"""Real data sets, which are not in the repository. Tests that need them are skipped without them."""

import os
from pathlib import Path

import pytest

WHAT_TO_DO = (
    "put GSM8K's train.jsonl and test.jsonl (data set openai/gsm8k, subset main, as JSONL) into gsm8k/ and MATH-500's "
    "test.jsonl (data set HuggingFaceH4/MATH-500) into math_500/, and set TEST_DATA to the folder that holds both"
)
_FILES = ("gsm8k/train.jsonl", "gsm8k/test.jsonl", "math_500/test.jsonl")


def folder() -> Path:
    """Return the folder that TEST_DATA names; skip the test if TEST_DATA is not set, in continuous integration too."""
    named = os.environ.get("TEST_DATA")
    if not named:
        pytest.skip(f"no real data: {WHAT_TO_DO}")
    if missing := [file for file in _FILES if not (Path(named) / file).is_file()]:
        pytest.fail(f"TEST_DATA={named!r} has no {', '.join(missing)}: {WHAT_TO_DO}")
    return Path(named)
