"""Checks of weights and tokenizer from elsewhere before they are copied: can they be trained and played?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from storage.versions import contents
from storage.versions.model_files import INDEX
from storage.versions.weights import not_finite

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_FLOATS = ("F64", "F32", "F16", "BF16")
_DIGITS = "12345 + 67890"
_NAMED = 3  # tensors that a message names


class PolicyError(ValueError):
    """A policy from elsewhere cannot be used; the message names it, the file, what is wrong and the remedy."""


def check_weights(folder: Path) -> None:
    """Check every tensor of a model.

    Raises:
        ValueError: a file is missing, truncated or not safetensors; or weights are quantised, NaN or infinite.
    """
    for path in _files(folder):
        if not path.is_file():
            raise ValueError(f"{path} is missing: copy all files of the model")
        if problems := contents.safetensors(path):
            raise ValueError(f"{path} {problems[0]}: it was copied in part, or is no such file; copy it again")
        _check_tensors(path)


def _files(folder: Path) -> list[Path]:
    """List the files that transformers would load."""
    if (folder / "model.safetensors").is_file() or not (folder / INDEX).is_file():
        return [folder / "model.safetensors"]
    shards = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
    return [folder / name for name in sorted(set(shards))]


def _check_tensors(path: Path) -> None:
    with safe_open(path, framework="np") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
    if quantised := [name for name, kind in types.items() if name.endswith("weight") and kind not in _FLOATS]:
        raise ValueError(
            f"{path}: {_short(quantised)} in {types[quantised[0]]}, which cannot be trained; give weights in one of "
            f"{', '.join(_FLOATS)}"
        )
    try:
        broken = not_finite(path)
    except (SafetensorError, RuntimeError, TypeError) as error:
        raise ValueError(f"{path}: its tensors cannot be read: {error}") from error
    if broken:
        raise ValueError(f"{path}: {_short(broken)} with NaN or infinities; give an earlier checkpoint")


def check_modalities(config: "PreTrainedConfig") -> None:
    """Raise ValueError for a model that reads more than text; its configuration has several parts."""
    if config.get_text_config() is not config:
        raise ValueError(
            f"{config.model_type} is a model of several modalities, which cannot be trained here: give a model that "
            "reads text alone"
        )


def check_vocabulary(folder: Path, tokenizer: "PreTrainedTokenizerBase", vocabulary: int) -> None:
    """Check that a tokenizer fits a model with `vocabulary` tokens.

    Added tokens may have larger ids: some text models share a tokenizer with image models and do not know the image
    placeholders. A prompt with such an id is refused when it is played.

    Raises:
        ValueError: other tokens have larger ids, or the tokenizer is the empty one that transformers makes up if it
            finds none.
    """
    ids, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    beyond = [token for token, number in ids.items() if number >= vocabulary and token not in added]
    if ids.keys() <= set(tokenizer.all_special_tokens):
        raise ValueError(f"{folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json, too")
    if beyond:
        raise ValueError(
            f"the tokenizer in {folder} has {len(beyond)} tokens, such as {beyond[0]!r}, beyond the {vocabulary} of "
            "the model (vocab_size in config.json): give the model's own tokenizer"
        )


def check_digits(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raise ValueError if digits change in encoding and decoding: the policy would read and answer other numbers."""
    decoded = str(tokenizer.decode(tokenizer.encode(_DIGITS, add_special_tokens=False)))
    if [letter for letter in decoded if letter.isdigit()] != [letter for letter in _DIGITS if letter.isdigit()]:
        raise ValueError(
            f"the tokenizer in {folder} makes {decoded[:80]!r} of {_DIGITS!r}: give the model's own tokenizer, whole"
        )


def _short(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
