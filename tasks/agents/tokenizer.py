"""Load the tokenizer of a policy."""

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
