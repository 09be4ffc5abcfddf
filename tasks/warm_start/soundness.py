"""Whether weights and a tokenizer from elsewhere can be trained and played with: looked at before they are copied."""

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
_NAMED = 3  # tensors that a message spells out


class PolicyError(ValueError):
    """A policy from elsewhere cannot be used; the message names it, the file, what is wrong and the remedy."""


def check_weights(folder: Path) -> None:
    """Read every tensor of a model once.

    Raises:
        ValueError: a file is missing, cut or no safetensors; or weights are quantised, NaN or infinite.
    """
    for path in _files(folder):
        if not path.is_file():
            raise ValueError(f"{path} is missing: copy all files of the model")
        if problems := contents.safetensors(path):
            raise ValueError(f"{path} {problems[0]}: it was not copied whole, or is none; copy it again")
        _check_tensors(path)


def _files(folder: Path) -> list[Path]:
    """Those that transformers would load."""
    if (folder / "model.safetensors").is_file() or not (folder / INDEX).is_file():
        return [folder / "model.safetensors"]
    shards = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
    return [folder / name for name in sorted(set(shards))]


def _check_tensors(path: Path) -> None:
    with safe_open(path, framework="np") as file:
        types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
    if quantised := [name for name, kind in types.items() if name.endswith("weight") and kind not in _FLOATS]:
        raise ValueError(
            f"{path}: {_some(quantised)} in {types[quantised[0]]}, which cannot be trained; give weights in one of "
            f"{', '.join(_FLOATS)}"
        )
    try:
        broken = not_finite(path)
    except (SafetensorError, RuntimeError, TypeError) as error:
        raise ValueError(f"{path}: its tensors cannot be read: {error}") from error
    if broken:
        raise ValueError(f"{path}: {_some(broken)} with NaN or infinities; give a checkpoint from before they came")


def check_modalities(config: "PreTrainedConfig") -> None:
    """Raises ValueError for a model that reads more than text: its configuration is one of several parts."""
    if config.get_text_config() is not config:
        raise ValueError(
            f"{config.model_type} is a model of several modalities, which cannot be trained here: give a model that "
            "reads text alone"
        )


def check_vocabulary(folder: Path, tokenizer: "PreTrainedTokenizerBase", vocabulary: int) -> None:
    """Compare a tokenizer with a model that knows `vocabulary` tokens.

    Added tokens may have ids beyond: some models of text alone share a tokenizer with models of images, whose
    placeholders they do not know. A prompt that holds such an id is refused when it is played.

    Raises:
        ValueError: other tokens have ids beyond, or it is the empty tokenizer that transformers makes up where it
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
    """Raises ValueError where digits do not come back: the policy would read, and be judged by, other numbers."""
    said = str(tokenizer.decode(tokenizer.encode(_DIGITS, add_special_tokens=False)))
    if [letter for letter in said if letter.isdigit()] != [letter for letter in _DIGITS if letter.isdigit()]:
        raise ValueError(
            f"the tokenizer in {folder} makes {said[:80]!r} of {_DIGITS!r}: give the model's own tokenizer, whole"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
