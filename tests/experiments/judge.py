"""Compare scorers: the demo graded by math-verify, by a judge who is always right, and by one who errs in one of ten.

python -m tests.experiments.judge                 3 arms, three seeds, 60 updates each: half an hour on 2 cores
python -m tests.experiments.judge --seeds 1

The judges are a script that looks at the solution, so what is compared is the way of an answer to a judge and back, and
what its errors cost. The table's accuracy of an arm is by its own scorer. Writes judge.md.
"""

import hashlib
import re
from functools import partial

from tests.experiments.runs import Arm, Experiment
from tests.support.scripted_judge import scripted_judge

PROMPT = "score.args.judge.prompt='{{ solutions[0] }} | {{ answer }}'"


def script(question: str, errs: bool) -> tuple[int, str]:
    """Give 10 to an answer whose last number is the solution and 0 to others, or the contrary."""
    solution, _, answer = question.partition(" | ")
    right = re.findall(r"-?\d+", answer)[-1:] == [solution]
    wrong_way = errs and hashlib.sha256(question.encode()).digest()[0] < 256 // 10
    return 200, f"Score: {10 * (right != wrong_way)}"


if __name__ == "__main__":
    with scripted_judge(partial(script, errs=False)) as right, scripted_judge(partial(script, errs=True)) as erring:
        judged = ["score.type=judge", "models.judge.name=script", PROMPT, "reward.shape=success"]
        arms = [
            Arm("math-verify"),
            Arm("a judge", [*judged, f"models.judge.urls=[{right.url}]"]),
            Arm("a judge who errs", [*judged, f"models.judge.urls=[{erring.url}]"]),
        ]
        Experiment("judge", arms, 60).main((__doc__ or "").splitlines()[0])
