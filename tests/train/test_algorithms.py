"""Every algorithm: its gradient is that of the written formula, and its numbers those of its page by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs import algorithms
from configs.algorithms import NAMES, read_algorithm
from configs.score import Reward
from storage.records import Score, Trajectory
from tasks.train.advantages import Observed
from tasks.train.algorithms import make_algorithm
from tasks.train.algorithms.algorithm import Algorithm, Assignment
from tasks.train.algorithms.likelihood import DPO, KTO
from tasks.train.samples import Sample, build_samples
from tasks.train.version_trainer import check_noise
from tests.support.train_helpers import (
    assert_near,
    gradients,
    is_unchanged,
    make_scores,
    make_trainer,
    make_trajectory,
    random_rows,
    save_tiny,
    tiny_model,
    weights,
)
from tests.support.trees import Tree

NOT_NORMALISED = {"advantage": {"normalisation": "none"}}
LIMIT = 16
"""`max_new_tokens` of the trainers of these tests."""


@dataclass(frozen=True, eq=False)
class Token:
    """An action token, or an observation (`turn` is that before it), with its logprobs."""

    row: int
    turn: int
    logp: Tensor  # float64, with gradient
    entropy: Tensor
    behaviour: float
    reference: float
    teacher: float
    sampled: bool = True


class Naive:
    """Random rows, one token at a time, in float64. Turn k of an episode earns the sum of ±1 from k on."""

    def __init__(self, *models: PreTrainedModel, temperature: float) -> None:
        self.rows, self.scores = rows()
        self.success = {(score.trajectory_id, score.turn): score.success > 0.5 for score in self.scores}
        self.tokens = [t for number in range(len(self.rows)) for t in self._of_row(number, temperature, *models)]
        self.actions = [token for token in self.tokens if token.sampled]
        self.observations = [token for token in self.tokens if not token.sampled]

    def _of_row(self, number: int, temperature: float, *models: PreTrainedModel) -> list[Token]:
        row, logits = self.rows[number], [list[Tensor]() for _ in models]
        for start, end in zip(row.sequence_starts, [*row.sequence_starts[1:], len(row.token_ids)], strict=True):
            for of_model, model in zip(logits, models, strict=True):
                logits_of = model.double()(torch.tensor([row.token_ids[start:end]])).logits[0]
                of_model.append((logits_of / temperature).log_softmax(-1))
        own, reference, teacher = (torch.cat(of_model) for of_model in logits)
        found = list[Token]()
        for k, turn in enumerate(row.turns):
            if k and turn.start not in row.sequence_starts and row.turns[k - 1].end not in row.sequence_starts:
                found += [
                    Token(number, k - 1, own[t - 1, row.token_ids[t]], torch.zeros(()), 0.0, 0.0, 0.0, sampled=False)
                    for t in range(row.turns[k - 1].end, turn.start)
                ]
            for t in range(turn.start, turn.end):
                at = t - 1, row.token_ids[t]
                numbers = row.logprobs[t], reference[at].item(), teacher[at].item()
                entropy = -(own[t - 1].exp() * own[t - 1]).sum()
                found.append(Token(number, k, own[at], entropy, *numbers))
        return found

    def earned(self, row: int, turn: int, of_turn: Callable[[int, int], float]) -> float:
        return sum(of_turn(row, k) for k in range(turn, len(self.rows[row].turns)))

    def verdict(self, row: int, turn: int) -> float:
        return 1.0 if self.success[self.rows[row].trajectory_id, turn] else -1.0

    def right_ahead(self, row: int, turn: int) -> float:
        return float(any(self.verdict(row, k) > 0 for k in range(turn, len(self.rows[row].turns))))

    def peers(self, row: int, turn: int, value: Callable[[int, int], float]) -> list[float]:
        """Return the values that a turn is compared with: of all episodes if three or fewer reached it."""
        group = [n for n, other in enumerate(self.rows) if other.problem_id == self.rows[row].problem_id]
        reached = [n for n in group if len(self.rows[n].turns) > turn]
        compared = reached if len(reached) > 3 else group
        return [value(n, min(turn, len(self.rows[n].turns) - 1)) for n in compared]

    def centred(
        self, token: Token, value: Callable[[int, int], float], *, by_std: bool = False, others: bool = False
    ) -> float:
        peers = self.peers(token.row, token.turn, value)
        centred = value(token.row, token.turn) - sum(peers) / len(peers)
        if max(peers) - min(peers) < 1e-12:
            return 0.0
        if others:
            centred *= len(peers) / (len(peers) - 1)
        return centred / (float(np.std(peers)) + 1e-6) if by_std else centred

    def advantage(self, token: Token, **options: bool) -> float:
        return self.centred(token, lambda n, k: self.earned(n, k, self.verdict), **options)

    def length(self, row: int) -> int:
        return sum(token.row == row for token in self.actions)

    def mean(self, loss: Callable[[Token], Tensor], tokens: Sequence[Token] | None = None) -> Tensor:
        """Return the mean over the tokens; None: over all actions."""
        return torch.stack([loss(token) for token in (self.actions if tokens is None else tokens)]).mean()

    def mean_of_means(self, loss: Callable[[Token], Tensor]) -> Tensor:
        total = [loss(token) / self.length(token.row) for token in self.actions]
        return torch.stack(total).sum() / len(self.rows)

    def sequence_ratio(self, token: Token, *, recomputed: bool = False) -> Tensor:
        """Return the ratio of the sequence that the token is in: to sampling, or to the present weights, which is 1."""
        row = self.rows[token.row]
        own = [other for other in self.actions if other.row == token.row]
        if len(row.sequence_starts) > 1:  # each turn begins a sequence of its own
            own = [other for other in own if other.turn == token.turn]
        old = [other.logp.detach() if recomputed else other.behaviour for other in own]
        return torch.stack([other.logp - before for other, before in zip(own, old, strict=True)]).mean().exp()


def rows() -> tuple[list[Trajectory], list[Score]]:
    """Make rows of one or two turns, of which one has two sequences, and one group has equal returns."""
    made, scores = random_rows(longest=7)
    two = next(number for number, row in enumerate(made) if len(row.turns) == 2)
    made[two] = replace(made[two], sequence_starts=[0, made[two].turns[0].end])
    return made, scores


def ratio_of(token: Token) -> Tensor:
    return torch.exp(token.logp - token.behaviour)


def clip(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def k3(token: Token) -> Tensor:
    d = token.logp - token.reference
    return torch.exp(-d) - 1 + d


def naive_ppo(data: Naive, **options: Any) -> Tensor:
    knobs = algorithms.PPO.model_validate(options)
    weighed = knobs.behaviour_weight

    def loss(token: Token) -> Tensor:
        advantage = data.advantage(token)
        weight = (ratio_of(token) if weighed.level == "token" else data.sequence_ratio(token)).item()
        if weighed.cap and weight > weighed.cap:
            weight = weighed.cap if weighed.mode == "truncate" else 0.0
        if weighed.floor and weight < weighed.floor:
            weight = 0.0
        ratio = ratio_of(token) if knobs.objective == "behaviour" else torch.exp(token.logp - token.logp.detach())
        policy = clip(ratio, advantage, knobs.eps_clip, knobs.eps_clip_higher or knobs.eps_clip)
        if knobs.c_clip and advantage < 0:
            policy = torch.min(policy, torch.tensor(-knobs.c_clip * advantage))
        d = token.logp - token.reference
        kl = {"k1": d, "k2": d * d / 2, "k3": k3(token)}[knobs.kl.chosen_estimator]
        policy = policy * (weight if knobs.objective == "decoupled" else 1.0)
        return policy - knobs.entropy_coefficient * token.entropy + (knobs.kl.kl_ctl if knobs.kl.in_loss else 0) * kl

    return data.mean(loss)


def naive_grpo(data: Naive) -> Tensor:
    return data.mean_of_means(
        lambda token: clip(ratio_of(token), data.advantage(token, by_std=True), 0.2, 0.2) + 0.04 * k3(token)
    )


def naive_dr_grpo(data: Naive) -> Tensor:
    mean = data.mean(lambda token: clip(ratio_of(token), data.advantage(token), 0.2, 0.2))
    return mean * len(data.actions) / LIMIT / len(data.rows)


def naive_rloo(data: Naive) -> Tensor:
    def penalty(row: int, turn: int) -> float:
        own = [token for token in data.actions if (token.row, token.turn) == (row, turn)]
        return sum(-0.03 * (token.behaviour - token.reference) for token in own)

    def advantage(token: Token) -> float:
        of_kl = data.centred(token, lambda n, k: data.earned(n, k, penalty), others=True)
        return data.advantage(token, others=True) + of_kl

    return torch.stack([-advantage(token) * token.logp for token in data.actions]).sum() / len(data.rows)


def naive_reinforce_pp(data: Naive) -> Tensor:
    returns = []
    for place, token in enumerate(data.actions):
        later = [other for other in data.actions[place:] if other.row == token.row]
        kl = sum(0.001 * (other.behaviour - other.reference) for other in later)
        returns.append(data.earned(token.row, token.turn, data.verdict) - kl)
    mean, std = float(np.mean(returns)), float(np.std(returns)) + 1e-5
    advantages = {token: (value - mean) / std for token, value in zip(data.actions, returns, strict=True)}
    return data.mean(lambda token: clip(ratio_of(token), advantages[token], 0.2, 0.2))


def of_sequence(data: Naive, token: Token, ratio: Tensor) -> Tensor:
    """Return the loss of GSPO, weighted by the trainer's ratio to the policy that sampled."""
    weight = min(5.0, data.sequence_ratio(token).item())
    return weight * clip(ratio, data.advantage(token, by_std=True), 3e-4, 4e-4)


def naive_dapo(data: Naive) -> Tensor:
    return data.mean(lambda token: clip(ratio_of(token), data.advantage(token, by_std=True), 0.2, 0.28))


def naive_gspo(data: Naive) -> Tensor:
    return data.mean_of_means(lambda token: of_sequence(data, token, data.sequence_ratio(token, recomputed=True)))


def naive_gspo_token(data: Naive) -> Tensor:
    return data.mean_of_means(lambda token: of_sequence(data, token, token.logp.exp() / token.logp.exp().detach()))


def naive_cispo(data: Naive) -> Tensor:
    return data.mean(lambda token: -min(ratio_of(token).item(), 5.0) * data.advantage(token, by_std=True) * token.logp)


def naive_max_rl(data: Naive) -> Tensor:
    def advantage(token: Token) -> float:
        peers = data.peers(token.row, token.turn, data.right_ahead)
        rate = sum(peers) / len(peers)
        return (data.right_ahead(token.row, token.turn) - rate) / rate if rate else 0.0

    return data.mean(lambda token: clip(ratio_of(token), advantage(token), 0.2, 0.2))


def naive_mis(data: Naive, level: str = "token", floor: float = 0.5, cap: float = 5.0) -> Tensor:
    def loss(token: Token) -> Tensor:
        decides = ratio_of(token) if level == "token" else data.sequence_ratio(token)
        return -ratio_of(token) * data.advantage(token) * (floor <= decides.item() <= cap)

    return data.mean(loss)


def naive_rft(data: Naive) -> Tensor:
    return data.mean(
        lambda token: -token.logp, [token for token in data.actions if data.verdict(token.row, token.turn) > 0]
    )


def naive_dpo(data: Naive) -> Tensor:
    losses = []
    for problem in {row.problem_id for row in data.rows}:
        group = [number for number, row in enumerate(data.rows) if row.problem_id == problem]
        group.sort(key=lambda n: (-data.earned(n, 0, data.verdict), data.rows[n].trajectory_id))
        while len(group) > 1 and data.earned(group[0], 0, data.verdict) > data.earned(group[-1], 0, data.verdict):
            better, worse = (
                torch.stack([t.logp - t.reference for t in data.actions if t.row == n]).sum()
                for n in (group[0], group[-1])
            )
            losses.append(-torch.nn.functional.logsigmoid(0.1 * (better - worse)))
            group = group[1:-1]
    return torch.stack(losses).mean()


def naive_kto(data: Naive) -> Tensor:
    gained, losses = [], []
    for row in range(len(data.rows)):
        gained.append(torch.stack([t.logp - t.reference for t in data.actions if t.row == row]).sum())
    z0 = max(0.0, sum(each.item() for each in gained) / len(gained))
    for row, of_row in enumerate(gained):
        good = data.right_ahead(row, 0) > 0
        losses.append((1.5 if good else 0.5) * (1 - torch.sigmoid(0.2 * (of_row - z0) * (1 if good else -1))))
    return torch.stack(losses).mean()


def naive_opd(data: Naive) -> Tensor:
    return data.mean(lambda token: -ratio_of(token) * (token.teacher - token.behaviour))


def naive_echo(data: Naive) -> Tensor:
    policy = data.mean(lambda token: clip(ratio_of(token), data.advantage(token), 0.2, 0.2))
    return policy + 0.1 * data.mean(lambda token: -token.logp, data.observations)


OF_PPO: list[dict[str, Any]] = [
    {},
    {"behaviour_weight": {"cap": 1.2}},
    {"behaviour_weight": {"cap": 1.2, "mode": "mask", "floor": 0.8}},
    {"behaviour_weight": {"level": "sequence", "cap": 1.3, "floor": 0.9}},
    {"behaviour_weight": {"level": "sequence", "cap": 1.1, "mode": "mask"}},
    {"objective": "behaviour"},
    {"objective": "recomputed"},
    {"objective": "behaviour", "eps_clip_higher": 0.4, "c_clip": 1.1},
    {"kl": {"place": "loss", "estimator": "k1", "kl_ctl": 0.7}},
    {"kl": {"place": "loss", "estimator": "k2", "kl_ctl": 0.7}},
    {"kl": {"place": "loss", "estimator": "k3", "kl_ctl": 0.7}, "entropy_coefficient": 0.3},
]
SEQUENCES: dict[str, Any] = {"level": "sequence", "floor": 0.8, "cap": 1.2}
FORMULAS: dict[str, tuple[Callable[[Naive], Tensor], dict[str, Any]]] = {
    **{f"ppo, {knobs}": (partial(naive_ppo, **knobs), {"type": "ppo", **knobs, **NOT_NORMALISED}) for knobs in OF_PPO},
    "grpo": (naive_grpo, {}),
    "dr_grpo": (naive_dr_grpo, {}),
    "rloo": (naive_rloo, {}),
    "reinforce_pp": (naive_reinforce_pp, {}),
    "dapo": (naive_dapo, {}),
    "gspo": (naive_gspo, {}),
    "gspo_token": (naive_gspo_token, {}),
    "cispo": (naive_cispo, {}),
    "max_rl": (naive_max_rl, {}),
    "mis": (naive_mis, {}),
    "mis, sequences": (partial(naive_mis, **SEQUENCES), {"type": "mis", **SEQUENCES}),
    "rft": (naive_rft, {"distinct": False}),
    "dpo": (naive_dpo, {}),
    "kto": (naive_kto, {"beta": 0.2, "good_weight": 1.5, "bad_weight": 0.5}),
    "opd": (naive_opd, {}),
    "echo": (naive_echo, {"observations": "all"}),
}


@pytest.mark.parametrize(("name", "temperature"), [(name, (1.0, 0.8)[n % 2]) for n, name in enumerate(FORMULAS)])
def test_gradient_is_that_of_the_written_formula(tmp_path: Path, name: str, temperature: float) -> None:
    """Losses, weights and normalisers equal autograd in float64, with trees and several micro-batches.

    `policy/loss` in the metrics is the loss of the formula. Every algorithm has a formula.
    """
    assert {str(options.get("type", name)) for name, (_, options) in FORMULAS.items()} == set(NAMES)
    formula, options = FORMULAS[name]
    folders = [tmp_path / each for each in ("now", "first", "teacher")]
    save_tiny(folders[0])
    for folder, seed in zip(folders[1:], (7, 8), strict=True):
        tiny_model(seed=seed).save_pretrained(folder)
    model = tiny_model().double()
    loss = formula(Naive(model, tiny_model(seed=7), tiny_model(seed=8), temperature=temperature))
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    knobs = {"type": name, "temperature": temperature, **options, "micro_batch_tokens": 50}
    trainer = make_trainer(folders[0], version_0=folders[1], teacher=folders[2], **knobs)
    metrics = trainer.update(*rows(), version=2)
    assert_near(gradients(trainer), expected, 1e-5)
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert max(value.abs().max() for value in expected.values()) > 1e-5


def test_a_served_teacher_teaches_the_same(tmp_path: Path) -> None:
    """Its stored logprobs give the gradient of a teacher in the trainer; a trajectory that it never saw is an error."""
    save_tiny(tmp_path / "now")
    tiny_model(seed=8).save_pretrained(tmp_path / "teacher")
    data, taught = rows(), dict[str, list[float]]()
    for row in data[0]:
        of_row = taught[row.trajectory_id] = []
        for start, end in pairwise([*row.sequence_starts, len(row.token_ids)]):
            ids = torch.tensor([row.token_ids[start:end]])
            logprobs = torch.log_softmax(tiny_model(seed=8)(ids).logits[0, :-1], -1)
            of_row += [0.0, *logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()]
    found = []
    for teacher, given in ((tmp_path / "teacher", None), (None, taught)):
        trainer = make_trainer(tmp_path / "now", teacher=teacher, type="opd")
        trainer.update(*data, version=2, taught=given)
        found.append(gradients(trainer))
    assert_near(found[0], found[1], 1e-5)
    del taught[data[0][3].trajectory_id]
    with pytest.raises(ValueError, match=f"the teacher was not asked about {data[0][3].trajectory_id}"):
        trainer.update(*data, version=2, taught=taught)


def algorithm(name: str, **knobs: Any) -> Algorithm:
    return make_algorithm(read_algorithm({"type": name, **knobs}), 100)


def group(*episodes: Sequence[float]) -> list[Sample]:
    """Make samples of one problem from the successes of their turns; turn k has k + 1 tokens of its own."""
    made = [
        make_trajectory(f"e{number}", [[10 * number + k] * (k + 1) for k in range(len(turns))])
        for number, turns in enumerate(episodes)
    ]
    scores = [score for number, turns in enumerate(episodes) for score in make_scores(f"e{number}", *turns)]
    return build_samples(made, scores, Reward())


def assigned(name: str, samples: Sequence[Sample], **knobs: Any) -> Assignment:
    observed = [Observed(np.zeros(len(sample.actions))) for sample in samples]
    return algorithm(name, **knobs).assign(samples, observed)


def test_rft_learns_right_turns_and_the_calls_before_them() -> None:
    """Weights of wrong, call, right are 0, 1, 1; of right, wrong 1, 0; equal completions count once."""
    chain, other = group([0, 0, 1], [1, 0])
    called = replace(chain, graded=np.array([True, False, True]))
    found = assigned("rft", [called, other]).weights["ce"]
    assert [list(each) for each in found] == [[0, 1, 1, 1, 1, 1], [1, 0, 0]]
    twice = [other, replace(other, trajectory_id="again")]
    assert [list(each) for each in assigned("rft", twice).weights["ce"]] == [[1, 0, 0], [0, 0, 0]]
    assert [list(each) for each in assigned("rft", twice, distinct=False).weights["ce"]] == [[1, 0, 0]] * 2


@pytest.mark.parametrize(
    ("name", "episodes", "gained", "expected"),
    [
        # Of `dpo` z is 0.1 times the difference, 3.
        ("dpo", ([1], [0]), ([2.0], [-1.0]), {"pairs": 1, "loss": 0.5544, "margin": 0.3, "preferred": 1}),
        # The reference point is (3 - 1) / 2: both z are 0.2.
        ("kto", ([0, 1], [0]), ([2.0, 0.5, 0.5], [-1.0]), {"kl": 1.0, "good": 0.5, "value": 0.5498}),
    ],
)
def test_metrics_of_pairs_and_thumbs_by_hand(
    name: str, episodes: list[list[float]], gained: list[list[float]], expected: dict[str, float]
) -> None:
    """What each episode gained on the reference decides them; `kto` may call an episode good that earns more than 0."""
    samples = group(*episodes)
    values = {number: np.array(of_episode, np.float32) for number, of_episode in enumerate(gained)}
    found = algorithm(name)
    assert isinstance(found, DPO | KTO)
    _, metrics = found.reweigh(dict(enumerate(samples)), values, {n: 0 * value for n, value in values.items()})
    del metrics["policy/loss"]  # that of the formula
    assert metrics == pytest.approx({f"{name}/{key}": value for key, value in expected.items()}, abs=1e-4)
    if name == "kto":
        bad = algorithm("kto", good_above=0.5)  # wrong, then right: -1 and 1 earn 0
        assert [each[0] for each in bad.assign(samples, []).weights["ce"]] == [-1.0, -1.0]


def test_reinforce_pp_charges_no_candidate_the_kl_of_its_siblings() -> None:
    """A planner, two candidates of one request, and an answer; tokens of the turns cost 0.1, 0.2, 0.3 and 0.4."""
    tree = Tree(follows=[-1, 0, 0, 2], rewards=[None, None, None, 0], asked=[0, 1, 1, 3], received=[0, 1, 2, 3])
    tree = replace(tree, paid=[0, 0, 0, 4])
    (sample,) = build_samples([tree.trajectory()], tree.scores(), Reward(shape="raw"))
    costs = -0.1 * (1.0 + sample.turn_of_action.astype(np.float64))
    other = replace(sample, trajectory_id="u", returns=sample.returns + 1)
    of_both = algorithm("reinforce_pp").assign([sample, other], [Observed(costs), Observed(0 * costs)]).advantages
    # Both tokens of the answer cost 0.4, of the second candidate 0.3, of the first 0.2, of the planner 0.1.
    expected = np.array([-2.0, -1.9, -1.2, -1.0, -1.4, -1.1, -0.8, -0.4])
    both = np.append(expected, np.ones(8))
    assert of_both[0] == pytest.approx((expected - both.mean()) / (both.std() + 1e-5))


def test_echo_chooses_what_followed_a_call() -> None:
    """Call, output, answer, feedback, answer: `tools` chooses the output, `all` the feedback, too."""
    (sample,) = group([0, 0, 1])  # prompt 0-2, turn 3, feedback 4-5, turn 6-7, feedback 8-9, turn 10-12
    called = replace(sample, graded=np.array([False, True, True]))
    for kind, expected in (("tools", [4, 5]), ("all", [4, 5, 8, 9])):
        (found,) = assigned("echo", [called], observations=kind).observations or []
        assert found.positions.tolist() == expected
    rewritten = replace(called, starts=np.array([0, 5]))
    (none,) = assigned("echo", [rewritten]).observations or []
    assert none.positions.tolist() == []  # nothing in the new sequence follows an action of its own


@pytest.mark.parametrize("length", [2, 40])
def test_gspo_does_not_clip_rounding(tmp_path: Path, length: int) -> None:
    """The engine's logprobs are those of the same weights, 0.01 nats apart as in bfloat16: nothing has moved."""
    made = [make_trajectory(f"t{n:02}", [[10 + n] * length], problem=f"p{n // 4}") for n in range(24)]
    model, draw, noisy = tiny_model(), np.random.default_rng(0), []
    for row in made:
        with torch.no_grad():
            logp = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        near = [logp[at - 1, row.token_ids[at]].item() + draw.normal(0, 0.01) for at in range(3, 3 + length)]
        noisy.append(replace(row, logprobs=[0.0] * 3 + near))
    scores = [score for n, row in enumerate(made) for score in make_scores(row.trajectory_id, float(n % 4 > 1))]
    found = make_trainer(save_tiny(tmp_path), type="gspo").update(noisy, scores, version=0)
    assert found["policy/clip_fraction"] == 0
    assert 0.4 < found["proximal/sequence_difference"] / (0.008 / length**0.5) < 1.6
    check_noise(found, "gspo")
    with pytest.raises(ValueError, match=r"type=gspo clips \d+% of the first minibatch.* below the noise of the"):
        check_noise(found | {"policy/first_clip_fraction": 0.3}, "gspo")


def test_nothing_chosen_changes_nothing(tmp_path: Path) -> None:
    """Without a right turn, expert iteration has nothing to learn from: the update says so and leaves the policy."""
    made, scores = rows()
    trainer = make_trainer(save_tiny(tmp_path), type="rft")
    before = weights(trainer)
    assert trainer.update(made, [replace(s, success=0.0, reward=0.0) for s in scores], version=2)["trajectories"] == 0
    assert is_unchanged(trainer, before)
