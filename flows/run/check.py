"""Play a scripted episode, and ask models about it, before anything expensive: `--check`, and the start of new runs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from configs import Config, ConfigError
from flows.run.resources import open_verifier
from flows.run.workspace import Workspace, models_of
from storage.errors import UnavailableError
from storage.records import Problem
from storage.visible import described, printable
from tasks.inference.devices import check_split
from tasks.problems.mixture import by_member, load_source, naming
from tasks.score.scorers import use_of_solutions
from tasks.warm_start.policy_sizes import policy_tokenizer, policy_values


def check(config: Config) -> str:
    """Play one episode with a scripted policy, and say what happened."""
    workspace = Workspace(config)
    if findings := _try_out(workspace, problems_of(workspace), lambda line: print(printable(line))):
        raise ConfigError("\n".join(findings))
    return "the configuration plays"


def check_new_run(workspace: Workspace, problems: Sequence[Problem], warn: Callable[[str], None]) -> None:
    """Play a scripted episode, and `warn` of what may be wrong.

    Raises:
        InferenceError: a model beside the policy cannot be served or takes no question, or its servers hold another.
        ConfigError: an episode fails before the policy is asked. With workers in other processes this is a warning,
            since another machine may have what the episode lacks here.
    """
    try:
        findings = _try_out(workspace, problems, lambda line: None)
    except ConfigError as error:
        if not workspace.config.plays_apart:
            raise
        findings = [str(error)]
    if workspace.models:
        workspace.models.start()
    for finding in findings:
        warn(f"check: {finding}. If the scripted policy is to blame, ignore this; `--check` shows its episode")


def _try_out(workspace: Workspace, problems: Sequence[Problem], tell: Callable[[str], None]) -> list[str]:
    """Play a scripted episode of the first problem, or of the shortest or the last if those before cannot be played.

    In a mixture do so for each member. Then ask each model beside the policy one question about that, before any is
    paid for. `--check` asks only those whose servers run already.
    """
    from tasks.annotate.annotating import ask_once, asker
    from tasks.rollout.scripted import play_scripted

    config, rows, opened = workspace.config, list[dict[str, Any]](), workspace.models
    with open_verifier(workspace, workers=1) as verifier:
        try:
            if not config.inference.urls:
                check_split(config.inference, policy_values(config))
            for role in config.models.served():
                asker(config, role)  # needs its files, and a chat template
            policy, findings = policy_tokenizer(config), list[str]()
            for part, own in by_member(config.problems, problems):
                few = [own[0], min(own, key=lambda problem: len(problem.prompt)), own[-1]]
                with naming(part.where):
                    findings += [
                        f"{part.where}{line}" for line in play_scripted(config, policy, verifier, few, tell, rows)
                    ]
        except (UnavailableError, ConfigError):
            raise
        except Exception as error:  # transformers and tokenizers raise whatever their parsers raise
            known = isinstance(error, ValueError | RuntimeError)
            raise ConfigError(str(error) if known else f"policy: no usable tokenizer: {described(error)}") from error
    with models_of(workspace):
        for role, knobs in config.models.served().items():
            findings += ask_once(config, role, workspace.models if opened or knobs.urls else None, rows, tell)
    return findings


def problems_of(workspace: Workspace) -> Sequence[Problem]:
    """Return the problems for training."""
    config = workspace.config
    use, most_bad = partial(use_of_solutions, config.score), config.problems.max_bad_share
    loaded = [load_source(part, most_bad, use, workspace.read_problems) for part in config.problems.trained]
    return [problem for each in loaded for problem in each.problems]
