"""What an entry of each kind of log must hold.

A digest shows that an entry is as it was written, not that this pipeline wrote it. So the fields are checked as well,
whenever an entry is read. Additional fields are allowed: a newer program may have added them. `storage.logs.nights` and
`storage.versions.journal` check their own entries.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from storage import layout
from storage.errors import DamagedError
from storage.objects.keys import Key, check_key
from storage.objects.seal import field_errors

LOST = "lost"
"""Kind of an entry of the catalog that stands where one was damaged."""


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True)  # 7 is no text, and "7" no number


class _CatalogEntry(_Entry):
    kind: str
    version: str
    parents: list[Key]

    @field_validator("version")
    @classmethod
    def _check_version(cls, version: str, fields: ValidationInfo) -> str:
        kind = fields.data.get("kind")
        if kind == "alias" and not layout.is_alias(version):
            raise ValueError(f"{version!r} is not a name for an alias")
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


class _SignOfLife(_Entry):
    released: bool = False
    ttl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def check_sign(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `values`, a holder's sign of life, if its fields are right. Raises StorageError, as `check_entry` does."""
    return _check(_SignOfLife, values, where)


def check_entry(log: str, values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `values`, an entry of the log with the prefix `log`, if its fields are right; errors name `where`.

    Raises:
        StorageError: its fields are not those that entries of this log have.
    """
    model = _model(log)
    return _check(model, values, where) if model else values


def _check(model: type[_Entry], values: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        model.model_validate(values)
    except ValidationError as error:
        raise DamagedError(f"{where} does not hold what it should ({field_errors(error)}): it is damaged") from None
    return values


def _model(log: str) -> type[_Entry] | None:
    if log == layout.CATALOG:
        return _CatalogEntry
    if log.startswith(layout.alias("")):
        return _AliasMove
    return _LeaseEntry if log.startswith(layout.lease("")) else None
