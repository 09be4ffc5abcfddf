"""Check for keys and passwords: data sets are copied and kept, and a policy repeats what it was trained on."""

import re

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.texts import search

_KINDS = {
    "a private key": r"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----",
    "an AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"\bgh[oprsu]_[A-Za-z0-9]{36,}|\bgithub_pat_[A-Za-z0-9_]{22,}",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_\-]{20,}",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9\-]{10,}",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "a Google key": r"\bAIza[0-9A-Za-z_\-]{35}",
    "a Stripe key": r"\b[rs]k_live_[0-9A-Za-z]{16,}",
    "an API key": r"\bsk-[A-Za-z0-9_\-]{20,}",
    "a JSON web token": r"\beyJ[A-Za-z0-9_\-]{8,1000}\.eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}",
    "a URL with a password": r"\b[a-z][a-z0-9+.\-]{1,15}://[^\s/:@]{1,64}:[^\s/@]{3,64}@[A-Za-z0-9\[]",
    "a password": r"\b(?i:password|passwd|pwd|(?:api|secret)[_\-]?key|(?:access|auth)[_\-]?token|client[_\-]?secret)"
    r"""["']?[ \t]*[:=][ \t]*(?:"[^"\n]{6,100}"|'[^'\n]{6,100}'|[^\s"'<>,;(){}$\\]{6,100})""",
}
_PATTERN = "|".join(_KINDS.values())
_COMPILED = {name: re.compile(pattern) for name, pattern in _KINDS.items()}
_VALUE = re.compile(r"""[:=][ \t]*["']?([^"'\n]*)""")
_PLACEHOLDER = re.compile(r"(?i)x{4}|\*{3}|\.{3}|your|example|changeme|placeholder|redacted|<|\[|\$\{|%\(")


def secrets(evidence: AuditEvidence) -> Measured:
    """Count prompts, turns and pieces of feedback with text that has the form of a well-known kind of key."""
    return search(evidence, "secrets", _PATTERN, kind, "what looks like a key or a password")


def kind(text: str) -> str:
    """Return what `text` contains, with its first 4 characters; empty for a placeholder or an ordinary word.

    >>> kind("password = hunter22"), kind("password = required"), kind("sk-learn-is-a-nice-library")
    ('a password (hunt…)', '', '')
    """
    for name, pattern in _COMPILED.items():
        for found in pattern.finditer(text):
            assigned = _VALUE.search(found[0]) if name == "a password" else None
            value = assigned[1] if assigned else found[0]
            if name not in ("a password", "an API key") or _is_secret(value):
                return f"{name} ({value[:4]}…)"
    return ""


def _is_secret(value: str) -> bool:
    return bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value) and not _PLACEHOLDER.search(value))


register_check("secrets", "Keys and passwords", "turn", secrets)
