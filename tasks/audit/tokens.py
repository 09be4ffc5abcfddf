"""Stored tokens as text, by the tokenizer of the run that they belong to."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from storage import layout
from storage.errors import DamagedError
from storage.logs import catalog
from storage.objects.store import Store
from storage.versions import manifests, model_files
from storage.versions.fetch import fetch_folder
from tasks.audit.checks.registry import AuditEvidence, SkippedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_BATCH_ROWS, _BATCH_TOKENS = 4096, 1_000_000
NO_TOKEN = 2**31 - 1  # decodes to nothing; negative ids would be refused


class Decoder:
    """A tokenizer that decodes many sequences at once, each as `Chat.decode` would."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self._backend = _backend(tokenizer)

    def texts(self, sequences: list[list[int]], *, special: bool = False) -> list[str]:
        """The text of each sequence; `special`: with special tokens. Ids that the vocabulary lacks are passed over."""
        if self._backend is None:
            return [str(self.tokenizer.decode(ids, skip_special_tokens=not special)) for ids in sequences]
        decoded: list[str] = self._backend.decode_batch(sequences, skip_special_tokens=not special)
        return decoded

    def round_trip(self, text: str) -> str:
        """`text` encoded and decoded: another one where the tokenizer normalises, or lacks a character."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self.texts([list(ids)], special=True)[0]


_SPACED = "do n't , is this it ? I 'm , he 's . We 've"


def _backend(tokenizer: Any) -> Any:
    """What decodes batches; None where there is none, or transformers changes spaces in what it has decoded."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids = tokenizer.encode(_SPACED, add_special_tokens=False)
    same = backend is not None and backend.decode(ids, skip_special_tokens=True) == tokenizer.decode(
        ids, skip_special_tokens=True
    )
    return backend if same else None


class Decoders:
    """The decoder of each run of an audit.

    Raises:
        SkippedError: no checkpoint of any run is left.
    """

    def __init__(self, evidence: AuditEvidence) -> None:
        rows = evidence.database.all("select data_set, run, policy from data_sets order by evaluation, iteration")
        policies: dict[str, dict[str, None]] = {}
        for _, run, policy in rows:
            policies.setdefault(run, {})[policy] = None
        found = {run: find_decoder(evidence.store, run, named, evidence.cache)[0] for run, named in policies.items()}
        self.missing = [run for run, decoder in found.items() if decoder is None]
        """Runs without one."""
        if not any(found.values()):
            raise SkippedError(f"no tokenizer: no checkpoint of {', '.join(found) or 'any run'} is left in the store")
        self.runs = {run: decoder for run, decoder in found.items() if decoder}
        self._run_of = {number: run for number, run, _ in rows if run in self.runs}

    def decode(self, evidence: AuditEvidence, query: str, *, special: bool = False) -> Iterator["Decoded"]:
        """The rows of `query` with the texts of their `ids`, a batch at a time.

        Args:
            evidence: its database is asked; it must not be asked anything else before the end.
            query: has columns `data_set` and `ids`, a list of integers.
            special: with special tokens.
        """
        reader = evidence.database.connection.sql(query).to_arrow_reader(_BATCH_ROWS)
        for batch in (part for read in reader for part in _cut(read)):
            numbers = batch.column("data_set").to_numpy(zero_copy_only=False)
            runs = np.array([self._run_of.get(number, "") for number in numbers.tolist()])
            for run in sorted(set(runs.tolist()) - {""}):
                part = batch.filter(pa.array(runs == run))
                yield Decoded(run, part, self.runs[run].texts(lists(part.column("ids")), special=special))

    @property
    def remark(self) -> str:
        """What to add to a finding where some runs could not be decoded."""
        return f"; not of {', '.join(self.missing)}, of which no checkpoint is left" if self.missing else ""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows of one run with the text of each."""

    run: str
    rows: pa.RecordBatch  # N
    texts: list[str]  # N

    def columns(self, *names: str) -> list[dict[str, Any]]:
        """These columns of each row."""
        return self.rows.select(list(names)).to_pylist()


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Into parts of about a million tokens, of which Python's lists take 40 MB."""
    ids: Any = batch.column("ids")
    lengths = ids.value_lengths().to_numpy(zero_copy_only=False)
    numbers = np.cumsum(lengths) // _BATCH_TOKENS
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), batch.num_rows]
    return (batch.slice(start, end - start) for start, end in pairwise(starts))


def lists(column: Any) -> list[list[int]]:
    """An Arrow column of lists of token ids as Python lists; many times faster than `to_pylist`."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    flat = np.where(values < 0, NO_TOKEN, values).tolist()
    ends = np.concatenate([[0], np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))])
    return [flat[start:end] for start, end in pairwise(ends.tolist())]


def open_decoder(store: Store, version: str, cache: Path) -> Decoder:
    """The tokenizer of a checkpoint; its weights are not fetched.

    Raises:
        StorageError: it is not committed, its files are gone or damaged, or there is no tokenizer among them.
    """
    manifest = manifests.read(store, version)
    files = [file for file in manifest.files if file.name.startswith("model/") and not file.name.endswith(_WEIGHTS)]
    if "model/tokenizer_config.json" not in [file.name for file in files]:
        raise DamagedError(f"{store.uri(version)} has no model/tokenizer_config.json: not a whole checkpoint")
    folder = fetch_folder(store, manifest, "model", cache, leave_out=_WEIGHTS)
    return _load(tuple(file.sha256 for file in files), _Place(folder))


@dataclass(frozen=True, slots=True)
class _Place:
    """A folder that makes no difference to `lru_cache`: the hashes of its files do."""

    folder: Path = field(hash=False, compare=False)


@lru_cache(maxsize=4)
def _load(contents: tuple[str, ...], place: _Place) -> Decoder:
    """Runs that follow each other mostly share one tokenizer."""
    from transformers import AutoTokenizer

    model_files.check(place.folder)
    try:
        return Decoder(AutoTokenizer.from_pretrained(place.folder, trust_remote_code=False, local_files_only=True))
    except Exception as error:  # the tokenizers library raises nothing more special where it cannot parse
        raise DamagedError(f"the tokenizer in {place.folder} cannot be loaded: {error}") from error


def find_decoder(store: Store, run: str, policies: Iterable[str], cache: Path) -> tuple[Decoder | None, str]:
    """That of a checkpoint which played a run's data sets, else of any other of the run; or None and why there is none.

    What is wrong with a single checkpoint is said by `storage verify`; another one may serve.
    """
    problem = f"no checkpoint of {run} is in the store"
    for version in _candidates(store, run, policies):
        if version and not store.exists(layout.tombstone(version)):
            try:
                return open_decoder(store, version, cache), ""
            except DamagedError as error:
                problem = str(error)
    return None, problem


def _candidates(store: Store, run: str, policies: Iterable[str]) -> Iterator[str]:
    yield from policies
    entries = catalog.read_all(store)
    kept = [entry.version for entry in entries if entry.kind == "checkpoint" and layout.run_of(entry.version) == run]
    yield from dict.fromkeys(reversed(kept))
