"""Readers of text that should not be in prompts, turns and feedback: keys, personal data, hidden characters.

`texts.sql` has the checks.
"""

import re
from collections.abc import Callable, Mapping

import phonenumbers
from stdnum import iban, luhn
from stdnum.us import ssn

from storage.visible import HIDDEN

Kinds = Mapping[str, tuple[str, Callable[[str, str, str], bool]]]
"""By name a pattern, which Python and RE2 read in the same way, and whether a match is of this kind: a function of the
match and the texts before and after it."""


def secret(text: str) -> str:
    """Return the key that `text` contains, with its first 4 characters; empty for a placeholder or an ordinary word.

    >>> secret("password = hunter22"), secret("password = required"), secret("sk-learn-is-a-nice-library")
    ('what looks like a password (hunt…)', '', '')
    """
    return _kind(text, _SECRETS)


def personal(text: str) -> str:
    """Return the personal data that `text` contains, with 4 characters; empty for arithmetic and wrong check digits.

    >>> personal("mail anna@mail.org"), personal("so 120-15-1000 = -895"), personal("card 4111 1111 1111 1112")
    ('what looks like an e-mail address (anna…)', '', '')
    """
    return _kind(text, _PERSONAL)


def hidden(text: str) -> str:
    """Return the first character that hides or reorders text, as its number in Unicode."""
    found = re.search(HIDDEN, text)
    return f"U+{ord(found[0]):04X}" if found else ""


_NEAR = 40  # characters
_ASSIGNED = re.compile(r"""[:=][ \t]*["']?([^"'\n]*)""")


def _kind(text: str, kinds: Kinds) -> str:
    for name, (pattern, is_real) in kinds.items():
        for found in re.finditer(pattern, text):
            assigned = _ASSIGNED.search(found[0]) if name == "a password" else None
            value = assigned[1] if assigned else found[0]
            before, after = text[max(0, found.start() - _NEAR) : found.start()], text[found.end() : found.end() + _NEAR]
            if is_real(value, before, after):
                return f"what looks like {name} ({value[:4]}…)"
    return ""


_PLACEHOLDER = re.compile(r"(?i)x{4}|\*{3}|\.{3}|your|example|changeme|placeholder|redacted|<|\[|\$\{|%\(")
_BEFORE = re.compile(r"(?:[=*/^<>\u00d7\u00f7+\-)\]}\d]|(?:^|[^A-Za-z])[A-Za-z])\s*$")
_AFTER = re.compile(r"\s*[=*/^<>\u00d7\u00f7+\-\d?]")
_CARD_WORDS = re.compile(r"(?i)\b(card|visa|mastercard|amex|credit|debit)\b")
_ISSUERS = re.compile(r"4|5[1-5]|2[2-7]|3[47]|6011|65|64[4-9]")


def _always(value: str, before: str, after: str) -> bool:
    return True


def _is_secret(value: str, before: str, after: str) -> bool:
    return bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value) and not _PLACEHOLDER.search(value))


def _is_social(value: str, before: str, after: str) -> bool:
    """Return False for numbers that are never assigned, and for those next to signs or other numbers."""
    is_near_others = re.search(r"[\d=*/^<>\u00d7\u00f7$\\]", before[-12:] + after[:12])
    return bool(ssn.is_valid(value) and not is_near_others) and not _in_formula(before, after)


def _is_card(value: str, before: str, after: str) -> bool:
    """Require groups of digits or a word such as "card": a tenth of all numbers has right check digits by chance."""
    digits, groups = re.sub(r"\D", "", value), [len(group) for group in re.findall(r"\d+", value)]
    marked = groups in ([4, 4, 4, 4], [4, 6, 5]) or _CARD_WORDS.search(before)
    is_number = marked and _ISSUERS.match(digits) and luhn.is_valid(digits) and len(set(digits)) > 1
    return bool(is_number) and not _in_formula(before, after)


def _is_phone(value: str, before: str, after: str) -> bool:
    """Return whether the number exists in the numbering plan of its country; without a code, in that of the USA."""
    try:
        number = phonenumbers.parse(value, "US")
    except phonenumbers.NumberParseException:
        return False
    return phonenumbers.is_valid_number(number) and not _in_formula(before, after)


def _in_formula(before: str, after: str) -> bool:
    """Return whether the match is part of a formula, or ends a question."""
    return bool(_BEFORE.search(before) or _AFTER.match(after))


_SECRETS: Kinds = {
    "a private key": (r"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----", _always),
    "an AWS key": (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", _always),
    "a GitHub token": (r"\bgh[oprsu]_[A-Za-z0-9]{36,}|\bgithub_pat_[A-Za-z0-9_]{22,}", _always),
    "a GitLab token": (r"\bglpat-[A-Za-z0-9_\-]{20,}", _always),
    "a Slack token": (r"\bxox[abeoprs]-[A-Za-z0-9\-]{10,}", _always),
    "a Hugging Face token": (r"\bhf_[A-Za-z0-9]{30,}", _always),
    "a Google key": (r"\bAIza[0-9A-Za-z_\-]{35}", _always),
    "a Stripe key": (r"\b[rs]k_live_[0-9A-Za-z]{16,}", _always),
    "an API key": (r"\bsk-[A-Za-z0-9_\-]{20,}", _is_secret),
    "a JSON web token": (r"\beyJ[A-Za-z0-9_\-]{8,1000}\.eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}", _always),
    "a URL with a password": (r"\b[a-z][a-z0-9+.\-]{1,15}://[^\s/:@]{1,64}:[^\s/@]{3,64}@[A-Za-z0-9\[]", _always),
    "a password": (
        r"\b(?i:password|passwd|pwd|(?:api|secret)[_\-]?key|(?:access|auth)[_\-]?token|client[_\-]?secret)"
        r"""["']?[ \t]*[:=][ \t]*(?:"[^"\n]{6,100}"|'[^'\n]{6,100}'|[^\s"'<>,;(){}$\\]{6,100})""",
        _is_secret,
    ),
}

_PERSONAL: Kinds = {
    "an e-mail address": (
        r"\b[A-Za-z0-9][A-Za-z0-9._%+\-]{0,63}@(?:[A-Za-z0-9\-]{1,63}\.){1,8}[A-Za-z]{2,24}\b",
        _always,
    ),
    "an IBAN": (
        r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b",
        lambda value, *_: bool(iban.is_valid(value)),
    ),
    "a card number": (
        r"\b(?:[3-6][0-9]{3}(?:[ \-]?[0-9]{4}){3}|3[47][0-9]{2}[ \-]?[0-9]{6}[ \-]?[0-9]{5})\b",
        _is_card,
    ),
    "a social security number": (r"\b[0-9]{3}-[0-9]{2}-[0-9]{4}\b", _is_social),
    "a telephone number": (r"\+[1-9][0-9 ().\-]{7,22}[0-9]\b|\([2-9][0-9]{2}\) [0-9]{3}-[0-9]{4}\b", _is_phone),
}

_KINDS = {"secret": _SECRETS, "personal": _PERSONAL}
PATTERNS = {name: "|".join(pattern for pattern, _ in kinds.values()) for name, kinds in _KINDS.items()}
PATTERNS["hidden"] = HIDDEN
"""A first filter for each reader, for RE2: a text that does not match it has nothing."""
