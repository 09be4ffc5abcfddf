"""A policy that plays what a test says, and data sets of it that are audited."""

from pathlib import Path

import pytest

from storage.objects.store import Store
from tasks.score.verifier import Verifier
from tests.support.audit_play import FEEDBACK, SUM, Audited, Play
from tests.support.train_helpers import save_tiny


@pytest.fixture(scope="module")
def play() -> Play:
    from tests.support.tiny_tokenizer import build_tokenizer

    return Play(build_tokenizer([SUM.prompt, FEEDBACK, r"\boxed"]))


@pytest.fixture(scope="module")
def model(play: Play, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer that has more tokens than the model."""
    folder = save_tiny(tmp_path_factory.mktemp("model"))
    play.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def audited(store: Store, tmp_path: Path, verifier: Verifier, model: Path) -> Audited:
    audited = Audited(store, tmp_path, verifier)
    audited.add_policy(model)
    return audited
