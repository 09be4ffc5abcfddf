"""The experts that the engine chose are put together from its answers, each for the token that it was chosen for."""

import base64
import io
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from storage.records import Experts, pack_experts, unpack_experts
from tasks.inference.api import BundledGenerationOutputs, Completion, InferenceError, experts_of
from tasks.rollout.conversation import with_experts
from tests.support.train_helpers import make_trajectory

REPLY = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDYsIDIsIDIpLCB9ICAgIC"
    "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoEAAAHAQQABwEEAAcFAwcAAQAAAwABAAc="
)
"""What vLLM 0.32 answered to a prompt of 3 tokens and 4 sampled ones, a model with 2 layers and 2 of 8 experts each."""


def numbered(first: int, count: int) -> Experts:
    """Make experts [count, 1 layer, 2] of which each token has its own: 10 and 11, 20 and 21 …"""
    return np.array([[[10 * n, 10 * n + 1]] for n in range(first, first + count)], np.int16)


def answer(prompt: list[int], *sampled: tuple[list[int], Experts]) -> BundledGenerationOutputs:
    completions = [
        Completion(ids, [-0.5] * len(ids), [0] * len(ids), "stop", experts=pack_experts(experts))
        for ids, experts in sampled
    ]
    return BundledGenerationOutputs("q", prompt, completions, [0] * len(sampled), 0.0)


def encoded(array: npt.NDArray[np.generic]) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_each_token_gets_the_experts_of_the_first_answer_that_read_it() -> None:
    """The last token of a turn is read with the next prompt, as are feedbacks; nothing reads the last one of all."""
    row = make_trajectory("t", [[7, 8], [9]])
    first, second = row.turns
    ids, before = row.token_ids, first.start
    others = answer(ids[:before], ([1], numbered(90, before)), (ids[before : first.end], numbered(1, before + 1)))
    later = answer(ids[: second.start], (ids[second.start : second.end], numbered(51, second.start)))
    experts = unpack_experts(with_experts(row, [others, later]).experts)
    known = [*range(1, before + 2), *range(51 + before + 1, 51 + second.start), -1]
    assert experts[:, 0, 0].tolist() == [n if n < 0 else 10 * n for n in known]


def test_each_sequence_begins_its_own_prompt() -> None:
    row = make_trajectory("t", [[7, 8], [9, 9]])
    end, second = row.turns[0].end, row.turns[1]
    row = replace(row, sequence_starts=[0, end])
    first = answer(row.token_ids[: row.turns[0].start], ([7, 8], numbered(1, end - 1)))
    other = answer(row.token_ids[end : second.start], ([9, 9], numbered(31, len(row.token_ids) - end - 1)))
    experts = unpack_experts(with_experts(row, [other, first]).experts)[:, 0, 0].tolist()
    assert experts[: end - 1] == [10 * n for n in range(1, end)]
    assert experts[end - 1] == experts[-1] == -1
    assert experts[end:-1] == [10 * n for n in range(31, 31 + len(row.token_ids) - end - 1)]


def test_a_beginning_of_a_completion_keeps_its_experts_and_what_no_answer_read_has_none() -> None:
    row = make_trajectory("t", [[7, 8]])
    start = row.turns[0].start
    longer = answer(row.token_ids[:start], ([7, 8, 4], numbered(1, start + 2)))
    assert (unpack_experts(with_experts(row, [longer]).experts) >= 0).all()
    assert with_experts(row, [answer([1], ([7, 8], numbered(1, 2)))]) == row
    assert with_experts(row, [replace(longer, completions=[replace(longer.completions[0], experts=b"")])]) == row


def test_the_answer_of_vllm_is_read() -> None:
    experts = unpack_experts(experts_of({"routed_experts": REPLY, "token_ids": [1, 2, 3, 4]}, prompt=3))
    assert experts.shape == (6, 2, 2)
    assert experts.flatten().tolist() == [4, 0, 0, 7, 1, 4, 0, 7, 1, 4, 0, 7, 5, 3, 7, 0, 1, 0, 0, 3, 0, 1, 0, 7]


@pytest.mark.parametrize(
    ("routed", "message"),
    [
        (None, "start it with --enable-return-routed-experts"),
        ("%", "Incorrect padding|base64"),
        (encoded(np.zeros((6, 2), np.uint8)), "experts of the shape"),
        (encoded(np.zeros((5, 2, 2), np.uint8)), "experts of 5 tokens for a prompt of 3 and a completion of 4"),
        (encoded(np.zeros((7, 2, 2), np.uint8)), "experts of 7 tokens"),
    ],
)
def test_other_answers_are_refused(routed: str | None, message: str) -> None:
    with pytest.raises((InferenceError, ValueError), match=message):
        experts_of({"routed_experts": routed, "token_ids": [1, 2, 3, 4]}, prompt=3)


def test_a_completion_that_was_cut_may_lack_the_last_ones() -> None:
    short = {"routed_experts": encoded(np.zeros((5, 2, 2), np.uint8)), "token_ids": [1, 2, 3, 4]}
    assert len(unpack_experts(experts_of(short, prompt=3, cut=True))) == 5
