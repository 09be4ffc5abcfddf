"""Checks of the fields that an entry of each kind of log must hold.

A digest shows that an entry is as it was written, not that this pipeline wrote it. So every read of an entry checks its
fields as well. Additional fields are allowed, because a newer program may have added them. `storage.logs.nights` and
`storage.versions.drafts` check their own entries.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from storage import layout
from storage.errors import DamagedError
from storage.objects.interface import Key, check_key
from storage.objects.seal import field_errors

LOST = "lost"
"""Kind of a placeholder in the catalog, which `repair` puts in place of a lost entry."""


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True)  # 7 is not accepted as a string, nor "7" as a number


class _CatalogEntry(_Entry):
    kind: str
    version: str
    parents: list[Key]

    @field_validator("version")
    @classmethod
    def _check_version(cls, version: str, fields: ValidationInfo) -> str:
        kind = fields.data.get("kind")
        if kind == "alias" and not layout.is_alias(version):
            raise ValueError(f"{version!r} is not a valid alias name")
        return version if kind == LOST else check_key(version)


class _AliasMove(_Entry):
    version: Key
    sha256: str
    reason: str
    by: str
    at: str


class _Holder(_Entry):
    machine: str
    host: str
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    started: int | None


class _LeaseEntry(_Entry):
    holder: _Holder
    label: str
    at: str
    ttl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]


def check_entry(log: str, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `values`, an entry of the log with the prefix `log`, if its fields are right.

    Raises:
        DamagedError: the fields are not those of an entry of this log; the message names `where`.
    """
    models: dict[str, type[_Entry]] = {
        layout.CATALOG: _CatalogEntry,
        layout.alias(""): _AliasMove,
        layout.lease(""): _LeaseEntry,
    }
    try:
        for prefix, model in models.items():
            if log.startswith(prefix):
                model.model_validate(values)
    except ValidationError as error:
        raise DamagedError(f"{where} has wrong fields ({field_errors(error)}): it is damaged") from None
    return values
