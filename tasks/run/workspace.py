"""What every stage of a run works with: its configuration, the store, and who is doing the work."""

from pathlib import Path

from prefect import runtime

from configs import Config
from storage.errors import StorageError
from storage.logs.leases import Lease
from storage.objects.cache import trim
from storage.objects.store import Store
from storage.versions.drafts import Provenance


class Workspace:
    """One run's configuration and store. A plain class, so that Prefect does not walk through it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.store = Store.of(config.storage)
        self.cache = Path(config.storage.cache)
        self.lease: Lease | None = None
        """The right to write the run; a flow holds it while it works."""

    @property
    def name(self) -> str:
        return self.config.run.name

    def provenance(self) -> Provenance:
        """The configuration and the flow run, for a manifest."""
        run_id = runtime.flow_run.id
        return Provenance(
            config=self.config.model_dump(mode="json"),
            prefect_run_id=str(run_id) if run_id else None,
            fence=self.lease,
        )

    def trim_cache(self, *in_use: str) -> None:
        """Keep the cache of a remote root within its size; the versions `in_use` stay."""
        if not self.store.is_local:
            trim(self.cache, int(self.config.storage.cache_gib * 2**30), in_use)

    @property
    def scratch(self) -> Path:
        """For files on their way to the store; emptied when the run is opened, so a killed flow leaves nothing.

        Raises:
            StorageError: the folder cannot be created.
        """
        folder = self.cache / "scratch" / self.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"storage.cache={str(self.cache)!r} cannot be used: {error}") from error
        return folder

    @property
    def label(self) -> str:
        """Who is doing the work, for people to read."""
        name = runtime.flow_run.name
        return f"flow run {name}" if name else ""
