"""Text of single tokens, by the tokenizer of the run that they belong to."""

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
_LOADING = Lock()  # transformers cannot be imported by two threads at once


def warm_up() -> None:
    """The import takes seconds, for which the first page with tokens should not wait."""
    with _LOADING:
        try:
            from transformers import AutoTokenizer  # noqa: F401
        except Exception as error:  # noqa: BLE001 - too many open files, no memory: a thread has nobody else to tell
            logger.warning("the tokenizers' library was not loaded ahead, a page that needs it tries again: %s", error)


class Vocabularies:
    """The tokenizers of runs, each read when it is needed first."""

    def __init__(self, store: Store, cache: Path) -> None:
        self._store, self._cache = store, cache
        self._decoder = lru_cache(maxsize=8)(self._find)

    def of(self, data_set: DataSet) -> tuple[Callable[[Iterable[int]], dict[int, str]], str]:
        """A function from ids to their texts; and, where there is no tokenizer, why not: texts are empty then."""
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
