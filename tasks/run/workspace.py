"""The workspace of a run: its configuration, store, cache and lease, used by every stage."""

import os
from pathlib import Path

from prefect import runtime

from configs import Config
from storage.logs.leases import Lease
from storage.objects.cache import scratch_of, trim_to_limit
from storage.objects.store import Store
from storage.version_names import PolicyVersion
from storage.versions import checkpoints
from storage.versions.checkpoints import Checkpoint
from storage.versions.drafts import Provenance


class Workspace:
    """One run's configuration and store. It is a plain class, because Prefect does not traverse plain classes."""

    def __init__(self, config: Config) -> None:
        _keep_compiled_code_private()
        self.config = config
        self.store = Store.of(config.storage)
        self.cache = Path(config.storage.cache)
        self.lease: Lease | None = None
        """The right to write the run; a flow holds it while it works. None: not held."""

    @property
    def name(self) -> str:
        return self.config.run.name

    def provenance(self) -> Provenance:
        """Return the configuration, the flow run and the lease, for a manifest."""
        run_id = runtime.flow_run.id
        return Provenance(
            config=self.config.model_dump(mode="json"),
            prefect_run_id=str(run_id) if run_id else None,
            fence=self.lease,
        )

    def open_served(self, policy: PolicyVersion) -> Checkpoint:
        """Fetch and verify a checkpoint for servers, which read its copy in bfloat16 if there is one and they use it.

        Raises:
            StorageError: as `checkpoints.open_checkpoint`.
        """
        halved = self.config.inference.dtype == "bfloat16"
        return checkpoints.open_checkpoint(self.store, policy, self.cache, serving=halved)

    def trim_cache(self, *in_use: str) -> None:
        """Delete from the cache of a remote root what exceeds its size; keep the versions `in_use`."""
        trim_to_limit(self.store, self.config.storage, in_use)

    @property
    def scratch(self) -> Path:
        """The folder for files before they are stored. Opening the run empties it, so a killed flow leaves no files.

        Raises:
            StorageError: the folder cannot be created.
        """
        return scratch_of(self.cache, self.name)

    @property
    def label(self) -> str:
        """The name of the flow run, for messages; empty outside of a flow run."""
        name = runtime.flow_run.name
        return f"flow run {name}" if name else ""


def _keep_compiled_code_private() -> None:
    """Choose the folder that torch makes when it is imported, and loads compiled code from.

    The default is a fixed name in TMPDIR, which another user may have made before.
    """
    if os.access(os.path.expanduser("~"), os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser("~/.cache/math-mt-ppo/torchinductor"))
