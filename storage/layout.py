"""Where versions live under the root. A version is a folder; its manifest makes it exist.

problems/<fingerprint>                      a problem set
runs/<run>/run                              the run itself: its configuration
runs/<run>/checkpoints/<policy version>     weights, tokenizer, optimizer, RNG, canary
runs/<run>/trajectories/<iteration>         rolled out with the checkpoint of the same number
runs/<run>/scores/<iteration>/<scorer>      verdicts on those trajectories
runs/<run>/evaluations/<policy version>     trajectories on the held-out problems; `…/scores/<scorer>` beside them
"""


def problems(fingerprint: str) -> str:
    return f"problems/{fingerprint}"


def run(name: str) -> str:
    return f"runs/{name}/run"


def checkpoint(name: str, version: int) -> str:
    return f"runs/{name}/checkpoints/{version:06d}"


def trajectories(name: str, iteration: int) -> str:
    return f"runs/{name}/trajectories/{iteration:06d}"


def scores(name: str, iteration: int, scorer: str) -> str:
    return f"runs/{name}/scores/{iteration:06d}/{scorer}"


def evaluation(name: str, version: int) -> str:
    return f"runs/{name}/evaluations/{version:06d}"


def evaluation_scores(name: str, version: int, scorer: str) -> str:
    return f"runs/{name}/evaluations/{version:06d}/scores/{scorer}"
