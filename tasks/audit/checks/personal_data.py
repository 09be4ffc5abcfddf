"""Addresses and numbers of people: what was collected by mistake must be found before it is trained on."""

import re
from collections.abc import Callable

from tasks.audit.checks.registry import AuditEvidence, Measured, register_check
from tasks.audit.texts import search

Judge = Callable[[str, str, str], bool]
"""Whether what was found is what it looks like, by itself and by what stands before and after it."""

_AROUND = 40  # characters
_BEFORE = re.compile(r"(?:[=*/^<>\u00d7\u00f7+\-)\]}\d]|(?:^|[^A-Za-z])[A-Za-z])\s*$")
_AFTER = re.compile(r"\s*[=*/^<>\u00d7\u00f7+\-\d?]")
_CARD_WORDS = re.compile(r"(?i)\b(card|visa|mastercard|amex|credit|debit)\b")
_ISSUERS = re.compile(r"4|5[1-5]|2[2-7]|3[47]|6011|65|64[4-9]")


def personal_data(evidence: AuditEvidence) -> Measured:
    """Counts prompts, turns and pieces of feedback with what has the form, and the check digits, of personal data."""
    pattern = "|".join(pattern for pattern, _ in _KINDS.values())
    return search(evidence, "personal_data", pattern, kind, "what looks like personal data")


def kind(text: str) -> str:
    """What `text` holds, with its first 4 characters; empty where it is arithmetic, or check digits are wrong.

    >>> kind("mail anna@mail.org"), kind("so 120-15-1000 = -895"), kind("card 4111 1111 1111 1112")
    ('an e-mail address (anna…)', '', '')
    """
    for name, (pattern, holds) in _KINDS.items():
        for found in re.finditer(pattern, text):
            before, after = text[: found.start()][-_AROUND:], text[found.end() :][:_AROUND]
            if holds(found[0], before, after):
                return f"{name} ({found[0][:4]}…)"
    return ""


def _is_mail(value: str, before: str, after: str) -> bool:
    return True


def _is_iban(value: str, before: str, after: str) -> bool:
    """By the check digits of ISO 7064, mod 97."""
    plain = value.replace(" ", "")
    digits = "".join(str(int(character, 36)) for character in plain[4:] + plain[:4])
    return 15 <= len(plain) <= 34 and int(digits) % 97 == 1


def _is_social(value: str, before: str, after: str) -> bool:
    """Not one of those that are given to nobody, nor between signs or other numbers."""
    area, group, serial = value.split("-")
    given = area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"
    return (
        given and not re.search(r"[\d=*/^<>\u00d7\u00f7$\\]", before[-12:] + after[:12]) and not _signed(before, after)
    )


def _is_card(value: str, before: str, after: str) -> bool:
    """In groups, or after a word for it: of large numbers every tenth has right check digits by chance."""
    digits, groups = re.sub(r"\D", "", value), [len(group) for group in re.findall(r"\d+", value)]
    told = groups in ([4, 4, 4, 4], [4, 6, 5]) or _CARD_WORDS.search(before)
    return bool(told and _ISSUERS.match(digits) and _luhn(digits)) and not _signed(before, after)


def _luhn(digits: str) -> bool:
    doubled = [int(digit) * (2 if place % 2 else 1) for place, digit in enumerate(reversed(digits))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0 and len(set(digits)) > 1


def _is_phone(value: str, before: str, after: str) -> bool:
    """Not a signed number: after a country's code in groups, or as long as few numbers of problems are."""
    digits, groups = re.sub(r"\D", "", value), re.findall(r"\d+", value)
    grouped = len(groups) > 2 and len(groups[0]) <= 3 and min(map(len, groups[1:])) > 1
    written = (grouped or (len(digits) >= 11 and len(groups) == 1)) and not re.search(r"\s[-.]|[-.]\s", value)
    return written and 8 <= len(digits) <= 15 and not _signed(before, after)


def _signed(before: str, after: str) -> bool:
    """Whether it stands in a formula, or is what a question asks for."""
    return bool(_BEFORE.search(before) or _AFTER.match(after))


_KINDS: dict[str, tuple[str, Judge]] = {
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
"""By name a pattern, as Python and RE2 both read it, and who judges what it finds."""

register_check("personal_data", "Personal data", "turn", personal_data)
