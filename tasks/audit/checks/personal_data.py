"""Check for personal data, such as addresses and card numbers, before a policy is trained on them."""

import re
from collections.abc import Callable

import phonenumbers
from stdnum import iban, luhn
from stdnum.us import ssn

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.texts import search

IsPersonal = Callable[[str, str, str], bool]
"""A function of a match, the text before it and the text after it: returns whether the match is personal data."""

_AROUND = 40  # characters
_BEFORE = re.compile(r"(?:[=*/^<>\u00d7\u00f7+\-)\]}\d]|(?:^|[^A-Za-z])[A-Za-z])\s*$")
_AFTER = re.compile(r"\s*[=*/^<>\u00d7\u00f7+\-\d?]")
_CARD_WORDS = re.compile(r"(?i)\b(card|visa|mastercard|amex|credit|debit)\b")
_ISSUERS = re.compile(r"4|5[1-5]|2[2-7]|3[47]|6011|65|64[4-9]")


def personal_data(evidence: AuditEvidence) -> Measured:
    """Count prompts, turns and pieces of feedback with text that has the form and the check digits of personal data."""
    pattern = "|".join(pattern for pattern, _ in _KINDS.values())
    return search(evidence, "personal_data", pattern, kind, "what looks like personal data")


def kind(text: str) -> str:
    """Return what `text` contains, with its first 4 characters; empty for arithmetic and for wrong check digits.

    >>> kind("mail anna@mail.org"), kind("so 120-15-1000 = -895"), kind("card 4111 1111 1111 1112")
    ('an e-mail address (anna…)', '', '')
    """
    for name, (pattern, is_personal) in _KINDS.items():
        for found in re.finditer(pattern, text):
            before, after = text[: found.start()][-_AROUND:], text[found.end() :][:_AROUND]
            if is_personal(found[0], before, after):
                return f"{name} ({found[0][:4]}…)"
    return ""


def _is_mail(value: str, before: str, after: str) -> bool:
    return True


def _is_iban(value: str, before: str, after: str) -> bool:
    return bool(iban.is_valid(value))


def _is_social(value: str, before: str, after: str) -> bool:
    """Return False for numbers that are never assigned, and for those next to signs or other numbers."""
    return (
        bool(ssn.is_valid(value))
        and not re.search(r"[\d=*/^<>\u00d7\u00f7$\\]", before[-12:] + after[:12])
        and not _in_formula(before, after)
    )


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


_KINDS: dict[str, tuple[str, IsPersonal]] = {
    "an e-mail address": (
        r"\b[A-Za-z0-9][A-Za-z0-9._%+\-]{0,63}@(?:[A-Za-z0-9\-]{1,63}\.){1,8}[A-Za-z]{2,24}\b",
        _is_mail,
    ),
    "an IBAN": (r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b", _is_iban),
    "a card number": (
        r"\b(?:[3-6][0-9]{3}(?:[ \-]?[0-9]{4}){3}|3[47][0-9]{2}[ \-]?[0-9]{6}[ \-]?[0-9]{5})\b",
        _is_card,
    ),
    "a social security number": (r"\b[0-9]{3}-[0-9]{2}-[0-9]{4}\b", _is_social),
    "a telephone number": (r"\+[1-9][0-9 ().\-]{7,22}[0-9]\b|\([2-9][0-9]{2}\) [0-9]{3}-[0-9]{4}\b", _is_phone),
}
"""A pattern, which Python and RE2 read in the same way, and a function that verifies its matches, by name."""

register_check("personal_data", "Personal data", "turn", personal_data)
