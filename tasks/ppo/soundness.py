"""Whether weights and a tokenizer from elsewhere can be trained and played with: looked at before they are copied."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from storage import contents
from storage.model_files import INDEX
from storage.reload import not_finite

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FLOATS = ("F64", "F32", "F16", "BF16")
_NAMED = 3  # tensors that a message spells out


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


def check_vocabulary(folder: Path, tokenizer: "PreTrainedTokenizerBase", vocabulary: int) -> None:
    """Of a model that knows so many tokens.

    Raises:
        ValueError: the tokenizer has ids beyond, or is the empty one that transformers makes up where it finds none.
    """
    ids = tokenizer.get_vocab()
    beyond = [token for token, number in ids.items() if number >= vocabulary]
    if ids.keys() <= set(tokenizer.all_special_tokens):
        raise ValueError(f"{folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json, too")
    if beyond:
        raise ValueError(
            f"the tokenizer in {folder} has {len(beyond)} tokens, such as {beyond[0]!r}, beyond the {vocabulary} of "
            "the model (vocab_size in config.json): give the model's own tokenizer"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
