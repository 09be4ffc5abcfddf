"""Load the tokenizer of a policy, and find the ends of its texts that the engine knows."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes of tokenizers that are all in `tokenizer.json`; the second is the name before transformers 5."""


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from its files alone, which never run code.

    To find a model's own class, transformers imports torch: 6 s of processor time in each process that plays. A
    tokenizer without a class of its own needs a third of that.

    Raises:
        Exception: a file is missing or cannot be parsed; the library raises no narrower error.
    """
    import transformers  # it imports its parts when they are used

    stated = folder / "tokenizer_config.json"
    plain = stated.exists() and json.loads(stated.read_bytes()).get("tokenizer_class") in _PLAIN
    kind: Any = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return tokenizer


def engine_ends(folder: Path) -> tuple[int, ...]:
    """Return the tokens at which vLLM stops because a model's configuration says so (`eos_token_id`).

    vLLM reads generation_config.json or, without it, config.json. It stops at the tokenizer's end of text as well.
    """
    stated = folder / "generation_config.json"
    values = json.loads((stated if stated.exists() else folder / "config.json").read_bytes())
    ends = values.get("eos_token_id")
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
