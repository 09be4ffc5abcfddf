r"""What of a text is thought. Only this module knows it: graders, agents, models beside the policy, imports ask here.

| text | thought | said |
|---|---|---|
| `<think>Hm</think>42`; other tags: see `_TAGS` | `Hm` | `42` |
| `<think>Hm`, which the token limit cut | `Hm` | nothing |
| `Hm</think>42`, after a prompt that ends with `<think>` | `Hm` | `42` |
| `Hm`, after such a prompt | `Hm` | nothing |

Many chat templates write the first tag themselves. `Chat.decode` puts it before the text of a completion, so that
stored texts tell by themselves what is thought.
"""

import re

_TAGS = r"(?:\w{1,9}:)?(?:think|thinking|thought|reasoning)"
_HARMONY = r"<\|channel\|>{}<\|message\|>"  # of two tokens and a word
_OPENED = rf"<{_TAGS}>|◁think▷|\[THINK\]|<\|begin_of_thought\|>|<\|START_THINKING\|>|{_HARMONY.format('analysis')}"
_CLOSED = rf"</{_TAGS}>|◁/think▷|\[/THINK\]|<\|end_of_thought\|>|<\|END_THINKING\|>|{_HARMONY.format('final')}"
PIECE = re.compile(rf"{_OPENED}|{_CLOSED}|<\|(?:channel|message)\|>", re.IGNORECASE)
"""A token of a tag."""
TAG = re.compile(rf"(?P<opened>{_OPENED})|{_CLOSED}", re.IGNORECASE)
_BEGIN = re.compile(rf"\s*(?:(?:{_OPENED})\s*)+", re.IGNORECASE)
_END = re.compile(_CLOSED, re.IGNORECASE)
_OPEN = re.compile(rf"(?:{_OPENED})\s*\Z", re.IGNORECASE)


def opened_by(prompt: str) -> str:
    r"""Return the tag, with the blanks after it, that opens a thought at the end of a prompt; "" if there is none.

    >>> opened_by("assistant\n<think>\n"), opened_by("assistant\n<think>\n\n</think>\n\n")
    ('<think>\n', '')
    """
    found = _OPEN.search(prompt)
    return found[0] if found else ""


def split(text: str) -> tuple[str, str]:
    r"""Return the thought with which a text begins, without its tags, and what is said after it.

    Tags further on are text: a model cannot hide words from a reader by them.

    >>> split("<think>\nHm\n</think>\n\n42 </think>"), split("<think>Hm"), split("42"), split("\n</think>\n\n42")
    (('Hm', '42 </think>'), ('Hm', ''), ('', '42'), ('', '42'))
    """
    thoughts, start = list[str](), 0
    if (end := _END.search(text)) and not text[: end.start()].strip():  # a thought that the template opened, empty
        thoughts, start = [""], end.end()
    while begin := _BEGIN.match(text, start):
        end = _END.search(text, begin.end())
        thoughts.append(text[begin.end() : end.start() if end else None].strip())
        start = end.end() if end else len(text)
    return "\n".join(filter(None, thoughts)), text[start:].lstrip() if thoughts else text


def after(opening: str, text: str) -> str:
    r"""Return what a model samples after the tag `opening`: the text's thought, if it has one, its end, and the rest.

    >>> after("<think>\n", "<think>\nHm</think>42"), after("<think>\n", "Hm</think>42"), after("[THINK]", "42")
    ('Hm\n</think>\n\n42', 'Hm\n</think>\n\n42', '[/THINK]\n\n42')
    """
    tag, first = opening.strip(), TAG.search(text)
    thought, content = split(opening + text if first and not first["opened"] else text)
    ended = tag.replace("begin", "end").replace("START", "END") if tag.startswith("<|") else f"{tag[0]}/{tag[1:]}"
    return "\n".join(filter(None, [thought, ended])) + f"\n\n{content}"


def without_thoughts(text: str) -> str:
    r"""Remove all thoughts, also those without a beginning; one that never ends reaches to the end of the text.

    >>> without_thoughts("a</think>b<think>c</think>d<think>g")
    'b\nd'
    """
    kept, begin, thinking = list[str](), 0, False
    for tag in TAG.finditer(text):
        if tag["opened"] and not thinking:
            kept.append(text[begin : tag.start()])
        elif not tag["opened"]:
            if begin and not thinking:  # a thought without a beginning reaches back to the one before
                kept.append("")
            begin = tag.end()
        thinking = bool(tag["opened"])
    kept += [] if thinking else [text[begin:]]
    return "\n".join(kept).lstrip("\n") if begin else "".join(kept)
