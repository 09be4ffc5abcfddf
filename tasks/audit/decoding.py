"""Decode stored tokens with the tokenizer of their run."""

import json
import re
import threading
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.objects.store import Store
from storage.versions import manifests, model_files
from storage.versions.checkpoints import manifest_of_model
from storage.versions.fetch import WEIGHTS, fetch_folder
from tasks.agents.chat import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WITHOUT_TEXT = "(without the problem's text)"
NO_TOKEN = 2**31 - 1  # decodes to no text; replaces negative ids, which the tokenizer refuses
_WITH_SPACES = "do n't , is this it ? I 'm , he 's . We 've"


class Decoder:
    """A tokenizer that decodes many sequences at once, with the texts of `Chat.decode`, but for tags of thoughts."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        ids = tokenizer.encode(_WITH_SPACES, add_special_tokens=False)
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        same = backend and backend.decode(ids, skip_special_tokens=True) == decoded
        self._backend = backend if same else None  # not used if transformers changes spaces after decoding
        self._lock = threading.Lock()  # DuckDB calls from several threads, and encoding is not safe in these

    def texts(self, sequences: list[list[int]], *, special: bool = False) -> list[str]:
        """Return the text of each sequence; `special`: with special tokens. Ids outside the vocabulary are skipped."""
        if self._backend is None:
            return [str(self.tokenizer.decode(ids, skip_special_tokens=not special)) for ids in sequences]
        decoded: list[str] = self._backend.decode_batch(sequences, skip_special_tokens=not special)
        return decoded

    def unended(self, sequences: list[list[int]]) -> list[str]:
        """Return the texts without the last token, if it was added to the vocabulary as a whole.

        Ends of turns are such tokens, and some tokenizers do not call them special.
        """
        added = self.tokenizer.added_tokens_decoder
        return self.texts([ids[:-1] if ids and ids[-1] in added else ids for ids in sequences])

    def round_trip(self, text: str) -> str:
        """Encode and decode `text`; the result differs if the tokenizer normalises text or lacks a character."""
        with self._lock:
            return self.texts([list(self.tokenizer.encode(text, add_special_tokens=False))], special=True)[0]

    def form(self, decoded: str, text: str) -> str:
        """Replace `text`, which templates may trim and tokenizers may normalise, by a mark in decoded tokens.

        Example: the form of "<user>What is 1 + 1?<end>" with the text "What is 1 + 1?" is "<user>⟨problem⟩<end>".
        """
        text = text.strip()
        if text not in decoded:
            text = self.round_trip(text)
        return "⟨problem⟩".join(decoded.rsplit(text, 1)) if text and text in decoded else WITHOUT_TEXT

    def shows(self, decoded: str, text: str) -> bool:
        r"""Return whether decoded tokens show `text`, which templates may trim, quote or split between its lines.

        Example: the texts of two messages, `3\n4`, are shown by `<message>3</message><message>"4"</message>`.
        """
        position = 0
        for line in filter(None, map(str.strip, text.splitlines())):
            ends = (at + len(each) for each in self.spellings(line) if (at := decoded.find(each, position)) >= 0)
            position = next(ends, -1)
            if position < 0:
                return False
        return True

    def has_alone(self, decoded: str, text: str) -> bool:
        """Return whether decoded tokens have `text` between marks that templates write."""
        return stands_alone(self.spellings(text.strip()), decoded)

    def spellings(self, line: str) -> Iterator[str]:
        """Yield how decoded tokens may show a line: as it is, in JSON, and as the tokenizer normalises it."""
        yield line
        yield json.dumps(line, ensure_ascii=False)[1:-1]
        if known := self.round_trip(line):
            yield known


_MARK = r"""(?:^|$|[\n<>\[\]|"])"""
"""Texts that templates write around an output: marks, quotes, or the begin and the end of a line."""


def stands_alone(spellings: Iterable[str], text: str) -> bool:
    r"""Return whether a text has one of the spellings between marks that templates write.

    >>> stands_alone(["19"], "so <tool> 19\n"), stands_alone(["19"], "so 19")
    (True, False)
    """
    either = "|".join(re.escape(_with_short_blanks(each)) for each in spellings)
    return re.search(rf"{_MARK}\s?(?:{either})\s?{_MARK}", _with_short_blanks(text)) is not None


def _with_short_blanks(text: str) -> str:
    """Write one blank or line break for several: patterns with runs of blanks would take quadratic time."""
    return re.sub(r"\s+", lambda blanks: "\n" if "\n" in blanks[0] else " ", text)


def lists(column: Any) -> list[list[int]]:
    """Convert an Arrow column of lists of token ids to Python lists, many times faster than `to_pylist`."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    flat = np.where(values < 0, NO_TOKEN, values).tolist()
    ends = np.concatenate([[0], np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))])
    return [flat[start:end] for start, end in pairwise(ends.tolist())]


_LOADED: dict[tuple[str, ...], Decoder] = {}
"""The tokenizers by the hashes of their files: successive checkpoints and runs mostly have the same."""


def open_decoder(store: Store, version: str, cache: Path) -> Decoder:
    """Fetch the tokenizer of a checkpoint, without its weights.

    Raises:
        StorageError: the checkpoint is not committed, its files are missing or damaged, or it has no tokenizer.
    """
    manifest = manifest_of_model(store, manifests.read(store, version))
    files = [file for file in manifest.files if file.name.startswith("model/") and not file.name.endswith(WEIGHTS)]
    if "model/tokenizer_config.json" not in [file.name for file in files]:
        raise DamagedError(f"{store.uri(version)} has no model/tokenizer_config.json: the checkpoint is incomplete")
    folder, hashes = fetch_folder(store, manifest, "model", cache, leave_out=WEIGHTS), tuple(f.sha256 for f in files)
    if hashes not in _LOADED:
        model_files.check(folder)
        try:
            _LOADED[hashes] = Decoder(load_tokenizer(folder))
        except Exception as error:  # the tokenizers library raises no narrower error if it cannot parse a file
            raise DamagedError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    return _LOADED[hashes]


def find_decoder(store: Store, run: str, policies: Iterable[str], cache: Path) -> tuple[Decoder | None, str]:
    """Return the tokenizer of one of `policies`, of another checkpoint of `run`, or of its import; or None and why.

    Damaged checkpoints are skipped, because another one may have the tokenizer; `storage verify` reports them.
    """
    problem = f"no checkpoint of {run} is in the store"
    entries = reversed(catalog.read_all(store))
    others = [each.version for each in entries if each.kind == "checkpoint" and layout.run_of(each.version) == run]
    imported = layout.run(run)  # has the tokenizer of another program's model
    for version in dict.fromkeys([*policies, *others, imported]):
        if version and not store.exists(layout.tombstone(version)):
            try:
                return open_decoder(store, version, cache), ""
            except DamagedError as error:
                problem = problem if version == imported else str(error)
    return None, problem
