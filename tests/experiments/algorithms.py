"""Compare the algorithms: the demo with each of them, with the defaults of their papers and the same learning rate.

python -m tests.experiments.algorithms                 16 arms, three seeds, 60 updates each: three hours on 2 cores
python -m tests.experiments.algorithms --iterations 2  a short trial

The teacher of on-policy distillation is PPO's last policy of the same seed. Writes algorithms.md.
"""

from configs.algorithms import NAMES
from tests.experiments.runs import LAST, SEED, Arm, Experiment

NEEDED = {
    "dapo": ["rollout.reject_equal=true"],  # its dynamic sampling
    "echo": ["algorithm.observations=all"],  # the demo has no tools
    "opd": [f"models.teacher.checkpoint=0-seed{SEED}@{LAST}"],
}
"""The overrides that an algorithm needs besides its name."""
ARMS = [Arm("ppo"), *(Arm(name, [f"algorithm.type={name}", *NEEDED.get(name, [])]) for name in NAMES if name != "ppo")]
EXPLAINING = {
    "policy/clip_fraction": "clipped",
    "policy/entropy": "entropy",
    "grad_norm": "gradient norm",
    "time/update": "seconds of the training passes",
}

if __name__ == "__main__":
    Experiment("algorithms", ARMS, 60, EXPLAINING).main((__doc__ or "").splitlines()[0])
