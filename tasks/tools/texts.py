"""Shortens texts for the policy."""


def shorten(text: str, most: int) -> str:
    r"""Leave out the middle of a text of more than `most` characters, and say so there.

    >>> shorten("1" * 20 + "2" * 500 + "3" * 20, 40)
    '11111111111111111111\n… 500 characters left out …\n33333333333333333333'
    """
    if (rest := len(text) - most) <= 0:
        return text
    half = most // 2
    return f"{text[: most - half]}\n… {rest:,} characters left out …\n{text[len(text) - half :]}"
