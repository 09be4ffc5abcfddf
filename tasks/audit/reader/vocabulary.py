"""Return the text of single tokens, with the tokenizer of their run."""

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from threading import Lock

from storage.objects.store import Store
from storage.version_names import PolicyVersion, select
from tasks.audit.selection import DataSet
from tasks.audit.tokens import NO_TOKEN, Decoder, find_decoder

logger = logging.getLogger(__name__)
_LOADING = Lock()  # two threads must not import transformers at the same time


def import_tokenizers() -> None:
    """Import the tokenizers' library early. It takes seconds, and the first page with tokens should not wait for it."""
    with _LOADING:
        try:
            from transformers import AutoTokenizer  # noqa: F401
        except Exception as error:  # noqa: BLE001 - such as too many open files or no memory; no caller catches it
            logger.warning("the tokenizers' library was not loaded early; a page that needs it tries again: %s", error)


class Vocabularies:
    """The tokenizers of runs; each is read at its first use."""

    def __init__(self, store: Store, cache: Path) -> None:
        self._store, self._cache = store, cache
        self._decoder = lru_cache(maxsize=8)(self._find)

    def texts_for(self, data_set: DataSet) -> tuple[Callable[[Iterable[int]], dict[int, str]], str]:
        """Return a function from ids to texts, and why the run has no tokenizer (then all texts are empty)."""
        with _LOADING:
            decoder, problem = self._decoder(data_set.run, _policy(data_set))

        def texts(ids: Iterable[int]) -> dict[int, str]:
            distinct = list(dict.fromkeys(ids))
            if decoder is None:
                return dict.fromkeys(distinct, "")
            known = [[number if 0 <= number < NO_TOKEN else NO_TOKEN] for number in distinct]
            return dict(zip(distinct, decoder.texts(known, special=True), strict=True))

        return texts, problem

    def _find(self, run: str, policy: str) -> tuple[Decoder | None, str]:
        return find_decoder(self._store, run, [policy], self._cache)


def _policy(data_set: DataSet) -> str:
    parents = data_set.manifest.parent_names if data_set.manifest else []
    return next(iter(select(PolicyVersion, parents)), "")
