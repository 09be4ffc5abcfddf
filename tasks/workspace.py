"""What every stage of a run works with: its configuration, the store, and who is doing the work."""

from pathlib import Path

from prefect import runtime

from configs import Config
from storage.manifests import Provenance
from storage.store import Store


class Workspace:
    """One run's configuration and store. A plain class, so that Prefect does not walk through it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.store = Store(config.storage.root)
        self.cache = Path(config.storage.cache)

    @property
    def name(self) -> str:
        return self.config.run.name

    def provenance(self) -> Provenance:
        """The configuration and the flow run, for a manifest."""
        run_id = runtime.flow_run.id
        return Provenance(config=self.config.model_dump(mode="json"), prefect_run_id=str(run_id) if run_id else None)
