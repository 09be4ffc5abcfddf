"""The folder of the tests' own Prefect settings and database, for the life of this process."""

from functools import cache

from storage.processes.folder import TemporaryFolder

prefect_home = cache(TemporaryFolder)
