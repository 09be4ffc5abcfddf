"""Rows that nobody admitted, such as those of other programs and old stores: what nothing can have sampled is refused.

Each attack would have paid: a logprob above 0 makes a token that the policy never says look likely, and a token that it
does not have ended the run without a word about the row.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.rollout import Rollout
from storage.records import pack_experts, unpack_experts
from tests.support.train_helpers import EXPERTS, is_unchanged, make_trainer, random_rows, save_tiny, weights
from tests.support.train_helpers import with_random_experts as routed


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize(
    ("column", "value", "wrong"),
    [
        ("token_ids", 999_999, "t005 have token_ids outside of 0 to 49"),
        ("token_ids", -1, "t005 have token_ids outside of 0 to 49"),
        *(("logprobs", value, "t005 have logprobs outside of") for value in (5.0, 2e38, -2e38, math.nan, None)),
        ("versions", -(10**6), "t005 have versions outside of -1 to"),
        ("versions", 3, "t005 have versions outside of -1 to 2"),
    ],
)
def test_what_no_policy_can_have_sampled_is_not_trained_on(
    tmp_path: Path, column: str, value: Any, wrong: str, *, chosen: bool
) -> None:
    """The message names the trajectory and the remedy, and no step was taken. Chosen rows may be of any version."""
    rows, scores = random_rows()
    place = rows[5].turns[0].start
    changed: Any = {column: [value if at == place else old for at, old in enumerate(getattr(rows[5], column))]}
    trainer = make_trainer(save_tiny(tmp_path), rollout=Rollout(max_head_offpolicyness=10**7))
    before, given = weights(trainer), [*rows[:5], replace(rows[5], **changed), *rows[6:]]
    if chosen and value == 3:
        trainer.update(given, scores, version=2, chosen=True)
        return
    with pytest.raises(ValueError, match=rf"{wrong}.*\(problems\.exclusions\)"):
        trainer.update(given, scores, version=2, chosen=chosen)
    assert is_unchanged(trainer, before)


def test_rounding_is_no_fault(tmp_path: Path) -> None:
    """Kernels give logprobs a little above 0, and imported rows have no versions."""
    rows, scores = random_rows(problems=1)
    kind = replace(rows[0], logprobs=[9e-5 * sampled for sampled in rows[0].action_mask])
    unknown = replace(rows[1], versions=[-1] * len(rows[1].versions))
    make_trainer(save_tiny(tmp_path)).update([kind, unknown, *rows[2:]], scores, version=2, chosen=True)


def test_experts_that_the_policy_does_not_have_are_refused(tmp_path: Path) -> None:
    """In 16 bits 65536 would be expert 0, and 40000 "unknown", with which the trainer would choose in silence."""
    rows, scores = random_rows(problems=1)
    given = [routed(row, seed) for seed, row in enumerate(rows)]
    trainer = make_trainer(save_tiny(tmp_path, "qwen3_moe"), routing_replay=True)
    for number in (EXPERTS, -2, 2**16, 40_000):
        experts: Any = unpack_experts(given[1].experts).astype(np.int64)
        experts[1, 0, 0] = number
        wrong = replace(given[1], experts=pack_experts(experts))
        message = r"t001(: experts that are no numbers from -1| have experts outside of -1 to 4)"
        with pytest.raises(ValueError, match=message):
            trainer.update([given[0], wrong, *given[2:]], scores, version=2)


@pytest.mark.parametrize("wrong", [1.0, 2e38, -2e38, math.nan, -math.inf])
def test_a_teacher_cannot_pay_by_logprobs_that_are_none(tmp_path: Path, wrong: float) -> None:
    """The advantage of a distilled token is what its teacher says, so +1 would be learnt from without end."""
    rows, scores = random_rows(problems=1)
    taught = {row.trajectory_id: [-1.0] * len(row.token_ids) for row in rows}
    taught["t002"] = [wrong] * len(rows[2].token_ids)
    trainer = make_trainer(save_tiny(tmp_path), type="opd")
    before = weights(trainer)
    with pytest.raises(ValueError, match="teacher's server gave .* or impossible logprobs to the trajectories t002"):
        trainer.update(rows, scores, version=2, taught=taught)
    assert is_unchanged(trainer, before)
