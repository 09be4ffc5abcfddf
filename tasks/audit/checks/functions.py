"""The functions of Python that SQL of checks calls: decoded tokens, and readings of texts.

A function that needs a tokenizer gets the number of a data set first. The tokens of a data set without one are null
as a text, and so is all that is read from that.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from storage.grouping import grouped
from tasks.audit.checks import AuditEvidence
from tasks.audit.checks.problems import contains_gold
from tasks.audit.checks.texts import PATTERNS, hidden, personal, secret
from tasks.audit.checks.verdicts import stated
from tasks.audit.database import AuditDatabase
from tasks.audit.decoding import WITHOUT_TEXT, Decoder, lists
from tasks.tables.sets import DataSet
from tasks.thoughts import TAG

_AT_ONCE = 512  # Python lists of as many long rows take some hundred MB
_AROUND = 30  # characters before the position where two forms begin to differ, and twice as many after it
_DECODED = ["integer", "varchar", "varchar"]  # number of the data set, decoded tokens, and a text
_METHODS = {"form": "varchar", "shows": "boolean", "has_alone": "boolean"}
"""Methods of `Decoder`, with the types that they return."""


def add_functions(evidence: AuditEvidence) -> None:
    """Add the functions that the SQL of checks calls to the database."""
    database, decoders = evidence.database, evidence.decoders
    members = {(each.run, name) for each in evidence.data_sets for name in _members(each)}
    database.create("members", "run varchar, name varchar", sorted(members))
    _add_decoding(database, decoders)
    for name, pattern in PATTERNS.items():
        database.connection.execute(f"set variable {name}_pattern = ?", [pattern])
    functions: list[tuple[str, Callable[..., Any], str, list[str]]] = [
        ("contains_gold", contains_gold, "boolean", ["varchar", "varchar[]"]),
        ("stated_answers", stated_answers, "struct(words varchar, is_gold boolean)[]", ["varchar", "varchar[]"]),
        ("difference", difference, "varchar", ["varchar", "varchar"]),
        ("without_tags", without_tags, "varchar", ["varchar"]),
        *((function.__name__, function, "varchar", ["varchar"]) for function in (secret, personal, hidden)),
        *((name, _of_decoder(decoders, name), returned, _DECODED) for name, returned in _METHODS.items()),
    ]
    for name, function, returned, parameters in functions:
        database.connection.create_function(name, function, parameters, returned)  # type: ignore[arg-type]


def _of_decoder(decoders: dict[int, Decoder], method: str) -> Callable[[int, str, str], Any]:
    return lambda number, decoded, text: getattr(decoders[number], method)(decoded, text)


def _members(data_set: DataSet) -> list[str]:
    """Return the names of the members of a mixture: each may have its own agent, and so its own prompts."""
    trained = data_set.manifest.knob("problems.train") if data_set.manifest else None
    return [member["name"] for member in trained] if isinstance(trained, list) else []


def _add_decoding(database: AuditDatabase, decoders: dict[int, Decoder]) -> None:
    """Add `decoded`, `decoded_whole` (with special tokens) and `unended` (without a token that ends a turn)."""

    def add(name: str, read: Callable[[Decoder, list[list[int]]], list[str]]) -> None:
        def decode(data_sets: Any, ids: Any) -> Any:
            places = grouped((int(number), place) for place, number in enumerate(data_sets.to_pylist()))
            rows, texts = ids.combine_chunks(), np.full(len(ids), None, object)
            for number in places.keys() & decoders.keys():
                for some in np.split(places[number], range(_AT_ONCE, len(places[number]), _AT_ONCE)):
                    texts[some] = read(decoders[number], lists(rows.take(pa.array(some))))
            return pa.array(texts, pa.string())

        database.connection.create_function(
            name,
            decode,
            ["integer", "integer[]"],
            "varchar",
            type="arrow",
            null_handling="special",  # type: ignore
        )

    add("decoded", Decoder.texts)
    add("decoded_whole", lambda decoder, ids: decoder.texts(ids, special=True))
    add("unended", Decoder.unended)


def stated_answers(text: str, solutions: list[str]) -> list[dict[str, Any]]:
    """Return what `stated` returns, as structs."""
    return [{"words": words, "is_gold": is_gold} for words, is_gold in stated(text, solutions)]


def without_tags(text: str) -> str:
    """Remove the tags of thoughts, of which a prompt may have the first, and tokenizers call some special."""
    return TAG.sub("", text).strip()


def difference(form: str, usual: str) -> str:
    """Show two forms of a prompt around the first position where they differ."""
    pairs = enumerate(zip(form, usual, strict=False))
    position = next((position for position, (one, other) in pairs if one != other), min(len(form), len(usual)))
    position = 0 if WITHOUT_TEXT in (form, usual) else position
    shown, expected = (repr(text[max(0, position - _AROUND) : position + 2 * _AROUND]) for text in (form, usual))
    return f"its prompt has {shown} where most of its run have {expected}"
