"""Play a scripted episode before anything expensive: `--check`, and the start of each new run."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from configs import Config, ConfigError
from configs.problems import StoredSource
from storage.errors import UnavailableError
from storage.records import Problem
from storage.versions import datasets
from storage.visible import printable
from tasks.problems import load_problems
from tasks.problems.problem_set import NoFilesError
from tasks.run.resources import open_verifier
from tasks.run.workspace import Workspace
from tasks.warm_start.policy_sizes import policy_tokenizer

if TYPE_CHECKING:
    from tasks.rollout.trial import Trial


def check(config: Config) -> str:
    """play one episode with a scripted policy, say what happened and stop"""
    workspace = Workspace(config)
    try:
        trial = _try_out(workspace, problems_of(workspace))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    seconds = ", ".join(f"{part} {spent:.1f}" for part, spent in trial.seconds.items())
    print(printable("\n".join([*trial.story, f"seconds: {seconds}", *(f"finding: {each}" for each in trial.findings)])))
    if trial.refusal or not trial.played:
        raise ConfigError(trial.refusal or "no scripted episode came to its end with a verdict: see the findings above")
    return "the configuration plays"


def check_new_run(workspace: Workspace, problems: Sequence[Problem], warn: Callable[[str], None]) -> None:
    """Play a scripted episode, and `warn` of what may be wrong.

    Raises:
        ConfigError: an episode fails before the policy is asked. With workers in other processes this is a warning,
            since another machine may have what the episode lacks here.
    """
    trial = _try_out(workspace, problems)
    for finding in trial.findings:
        warn(f"check: {finding}. If the scripted policy is to blame, ignore this; `--check` shows its episode")
    if trial.refusal and not workspace.config.plays_apart:
        raise ConfigError(f"a scripted episode fails before the policy is asked: {trial.refusal}")
    if trial.refusal:
        warn(f"check: {trial.refusal}")


def _try_out(workspace: Workspace, problems: Sequence[Problem]) -> "Trial":
    """Play scripted episodes of the first problem, or of the shortest or the last if those before cannot be played."""
    from tasks.rollout.trial import Scripted, Trial, WatchedChat

    few = [problems[0], min(problems, key=lambda problem: len(problem.prompt)), problems[-1]]
    trial, config = Trial(), workspace.config
    with open_verifier(workspace, workers=1) as verifier:
        try:
            with trial.timed("tokenizer and template"):
                chat = WatchedChat(*policy_tokenizer(config))
            Scripted(config, chat, verifier, trial).play(few)
        except UnavailableError:
            raise
        except (ValueError, RuntimeError) as error:  # tokenizer, template, agent or scorer cannot be used at all
            trial.refusal = str(error)
    return trial


def problems_of(workspace: Workspace) -> Sequence[Problem]:
    """Return the problems for training or, where their files are still to come, those held out."""
    knobs = workspace.config.problems
    for source in (knobs.train, knobs.held_out):
        if isinstance(source, StoredSource):
            return [Problem(**row) for row in datasets.rows(workspace.store, source.version, workspace.cache)]
        try:
            return load_problems(source, knobs.max_bad_share).problems
        except NoFilesError:
            if source is knobs.held_out:
                raise
    raise AssertionError("the last source is returned, or raises")
