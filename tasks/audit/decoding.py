"""Decode stored tokens with the tokenizer of their run."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from storage import layout
from storage.errors import DamagedError
from storage.grouping import grouped
from storage.logs import catalog
from storage.objects.store import Store
from storage.versions import manifests, model_files
from storage.versions.checkpoints import manifest_of_model
from storage.versions.fetch import WEIGHTS, fetch_folder
from tasks.agents.chat import load_tokenizer
from tasks.audit.checks import AuditEvidence, SkippedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_ROWS = 512  # Python lists of as many long rows take some hundred MB
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
        return self.texts([list(self.tokenizer.encode(text, add_special_tokens=False))], special=True)[0]

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

    def spellings(self, line: str) -> Iterator[str]:
        """Yield how decoded tokens may show a line: as it is, in JSON, and as the tokenizer normalises it."""
        yield line
        yield json.dumps(line, ensure_ascii=False)[1:-1]
        if known := self.round_trip(line):
            yield known


class Decoders:
    """The decoders of all runs in an audit.

    Raises:
        SkippedError: no checkpoint of any run is left.
    """

    def __init__(self, evidence: AuditEvidence) -> None:
        rows = evidence.database.all("select data_set, run, policy from data_sets order by evaluation, iteration")
        policies = grouped((run, policy) for _, run, policy in rows)
        decoders = {run: find_decoder(evidence.store, run, names, evidence.cache)[0] for run, names in policies.items()}
        self.missing = [run for run, decoder in decoders.items() if decoder is None]
        """Runs without a decoder."""
        if not any(decoders.values()):
            runs = ", ".join(decoders) or "any run"
            raise SkippedError(f"no tokenizer: no checkpoint of {runs} is left in the store")
        self.runs = {run: decoder for run, decoder in decoders.items() if decoder}
        self._run_of = {number: run for number, run, _ in rows if run in self.runs}

    def decode(self, evidence: AuditEvidence, query: str, *, special: bool = False) -> Iterator["Decoded"]:
        """Yield the rows of `query` with the texts of their `ids`, batch by batch.

        Args:
            evidence: its database runs the query. Run no other query on it until the iterator ends.
            query: SQL with the columns `data_set` and `ids`, a list of integers.
            special: decode special tokens, too.
        """
        reader = evidence.database.connection.sql(query).to_arrow_reader(_BATCH_ROWS)
        for batch in (read.slice(at, _BATCH_ROWS) for read in reader for at in range(0, read.num_rows, _BATCH_ROWS)):
            numbers = batch.column("data_set").to_numpy(zero_copy_only=False)
            runs = np.array([self._run_of.get(number, "") for number in numbers.tolist()])
            for run in sorted(set(runs.tolist()) - {""}):
                of_run = batch.filter(pa.array(runs == run))
                yield Decoded(run, of_run, self.runs[run].texts(lists(of_run.column("ids")), special=special))

    @property
    def remark(self) -> str:
        """A note for the finding about runs that could not be decoded; empty if all runs could."""
        missing = ", ".join(self.missing)
        return f"; runs without a checkpoint in the store were left out: {missing}" if missing else ""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows of one run with the text of each."""

    run: str
    rows: pa.RecordBatch  # N
    texts: list[str]  # N

    def columns(self, *names: str) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield the columns `names` of each row, and its text."""
        return zip(self.rows.select(list(names)).to_pylist(), self.texts, strict=True)


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
