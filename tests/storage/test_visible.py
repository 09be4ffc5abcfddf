"""Texts of others are told without the secrets of this process."""

import logging
import time

import pytest

from storage.visible import described, print_clean_logs, without_secrets

SECRETS = {
    "JUDGE_API_KEY": "sk-abc/def+0==",
    "HF_TOKEN": "hf_0123456789",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
    "MLFLOW_TRACKING_PASSWORD": "open sesame",
    "PREFECT_API_AUTH_STRING": "admin:mellon-friend",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer otlp-key-1,x-other=otlp-key-2",
    "MLFLOW_TRACKING_URI": "http://me:in-the-url@host:5000/path",
}
"""Values of secret variables, and what of each may stand nowhere."""
PARTS = ["sk-abc/def+0==", "hf_0123456789", "wJalrXUtnFEMI", "open sesame", "admin:mellon-friend", "mellon-friend"]
PARTS += ["otlp-key-1", "otlp-key-2", "in-the-url"]


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("part", PARTS)
def test_no_secret_is_told(part: str) -> None:
    """Whatever says it, its variable stands there instead."""
    told = without_secrets(f"bad: {part}, {part}!")
    assert part not in told
    assert told.count("⟨") == 2
    assert part not in described(ValueError(f"no {part}"))


def test_other_words_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a folder nor the name of a header is a secret, nor is a word that stands for no key."""
    monkeypatch.setenv("PWD", "/home/me/place")
    monkeypatch.setenv("VLLM_API_KEY", "none")
    monkeypatch.setenv("VLLM_MAX_TOKENS", "1234567")
    monkeypatch.setenv("SSH_KEY", "/proc/self")
    text = "authorization in /home/me/place, /proc/self: none of 1234567, http://host:5000/path, admin"
    assert without_secrets(text) == text


def test_a_long_key_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of service accounts have some thousand characters in base64, and each line of a log goes through this."""
    key = "A" * 30_000 + "=="
    monkeypatch.setenv("SERVICE_ACCOUNT_KEY", key)
    begun = time.process_time()
    assert without_secrets(f"no {key}!") == "no ⟨SERVICE_ACCOUNT_KEY⟩!"
    assert time.process_time() - begun < 1.0  # quadratic time is some ten seconds


def test_logs_have_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    """Messages, their arguments and tracebacks go through the same filter, also those of libraries."""
    print_clean_logs()
    try:
        raise RuntimeError("no sk-abc/def+0==")
    except RuntimeError:
        logging.getLogger("some.library").exception("%s failed", "hf_0123456789")
    assert "⟨HF_TOKEN⟩ failed" in caplog.text
    assert "no ⟨JUDGE_API_KEY⟩" in caplog.text
    assert not any(part in caplog.text for part in PARTS)
