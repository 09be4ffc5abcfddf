"""Play a scripted episode, and ask models beside the policy about it, before anything expensive.

`--check` does so, and the start of each new run.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from configs import Config, ConfigError
from storage.errors import UnavailableError
from storage.records import Problem
from storage.versions import datasets
from storage.visible import described, printable
from tasks.inference.devices import check_split
from tasks.problems.mixture import by_member, load_part, naming
from tasks.run.resources import open_verifier
from tasks.run.workspace import Workspace, models_of
from tasks.score.scorers import use_of_solutions
from tasks.warm_start.policy_sizes import policy_tokenizer, policy_values

Rows = list[dict[str, Any]]


def check(config: Config) -> str:
    """Play one episode with a scripted policy, and say what happened."""
    workspace, rows = Workspace(config), Rows()

    def tell(line: str) -> None:
        print(printable(line))

    findings = _try_out(workspace, problems_of(workspace), tell, rows)
    if findings := findings + _ask(workspace, rows, tell, start=False):
        raise ConfigError("\n".join(findings))
    return "the configuration plays"


def check_new_run(workspace: Workspace, problems: Sequence[Problem], warn: Callable[[str], None]) -> None:
    """Play a scripted episode, and `warn` of what may be wrong.

    Raises:
        InferenceError: a model beside the policy cannot be served, or its servers hold another one.
        ConfigError: a model beside the policy does not take a question; or an episode fails before the policy is asked,
            which is a warning with workers in other processes: another machine may have what the episode lacks here.
    """
    rows = Rows()
    try:
        findings = _try_out(workspace, problems, lambda line: None, rows)
    except ConfigError as error:
        if not workspace.config.plays_apart:
            raise
        findings = [str(error)]
    if workspace.models:
        workspace.models.start()
        findings += _ask(workspace, rows, lambda line: None, start=True)
    for finding in findings:
        warn(f"check: {finding}. If the scripted policy is to blame, ignore this; `--check` shows its episode")


def _ask(workspace: Workspace, rows: Rows, tell: Callable[[str], None], *, start: bool) -> list[str]:
    """Ask each model beside the policy one question about scripted episodes; return what may be wrong.

    Without `start` only those are asked whose servers run already.
    """
    from tasks.annotate.annotating import try_out

    config, findings = workspace.config, list[str]()
    with models_of(workspace):
        for role, knobs in config.models.served().items():
            findings += try_out(config, role, workspace.models if start or knobs.urls else None, rows, tell)
    return findings


def _try_out(workspace: Workspace, problems: Sequence[Problem], tell: Callable[[str], None], rows: Rows) -> list[str]:
    """Play a scripted episode of the first problem, or of the shortest or the last if those before cannot be played.

    In a mixture do so for each member. Add the episodes to `rows`.
    """
    from tasks.annotate.annotating import asker
    from tasks.rollout.trial import try_out

    config = workspace.config
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
                    found = try_out(config, policy, verifier, few, tell, rows.extend)
                    findings += [f"{part.where}{line}" for line in found]
            return findings
        except (UnavailableError, ConfigError):
            raise
        except Exception as error:  # transformers and tokenizers raise whatever their parsers raise
            known = isinstance(error, ValueError | RuntimeError)
            raise ConfigError(str(error) if known else f"policy: no usable tokenizer: {described(error)}") from error


def problems_of(workspace: Workspace) -> Sequence[Problem]:
    """Return the problems for training."""
    config = workspace.config

    def read_stored(version: str) -> list[Problem]:
        return [Problem(**row) for row in datasets.rows(workspace.store, version, workspace.cache)]

    use, most_bad = partial(use_of_solutions, config.score), config.problems.max_bad_share
    loaded = [load_part(part, most_bad, use, read_stored) for part in config.problems.trained]
    return [problem for each in loaded for problem in each.problems]
