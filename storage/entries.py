"""What an entry of each kind of log must hold.

A digest says that an entry is as it was written, not that this pipeline wrote it. So the fields are looked at, too,
whenever an entry is read. More fields than these are let be: a newer program may have added them. Nights and journals
are looked at by those who read them (`storage.nights`, `storage.journal`).
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from storage import layout
from storage.store import StorageError, check_key

LOST = "lost"
"""Kind of an entry of the catalog that stands where one was damaged."""
_SHOWN = 3
Key = Annotated[str, AfterValidator(check_key)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True)  # 7 is no text, and "7" no number


class _Attempt(_Entry):
    kind: str
    version: str
    parents: list[Key]

    @model_validator(mode="after")
    def _named(self) -> "_Attempt":
        if self.kind == "alias" and not layout.is_alias(self.version):
            raise ValueError(f"version={self.version!r} is no name of an alias")
        if self.kind != LOST:
            try:
                check_key(self.version)
            except StorageError as error:
                raise ValueError(f"version: {error}") from None
        return self


class _Move(_Entry):
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


class _Lease(_Entry):
    holder: _Holder
    label: str
    at: str
    ttl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Sign(_Entry):
    released: bool = False
    ttl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def check_sign(values: dict[str, Any], where: str) -> dict[str, Any]:
    """`values` of a lease holder's sign of life. Raises StorageError, like `check_entry`."""
    return _check(_Sign, values, where)


def check_entry(log: str, values: dict[str, Any], where: str) -> dict[str, Any]:
    """`values` of an entry of the log with that prefix; `where` it lies is told in errors.

    Raises:
        StorageError: its fields are not those that entries of this log have.
    """
    model = _model(log)
    return _check(model, values, where) if model else values


def _check(model: type[_Entry], values: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        model.model_validate(values)
    except ValidationError as error:
        raise StorageError(f"{where} does not hold what it should ({_told(error)}): it is damaged") from None
    return values


def _model(log: str) -> type[_Entry] | None:
    if log == layout.CATALOG:
        return _Attempt
    if log.startswith(layout.alias("")):
        return _Move
    return _Lease if log.startswith(layout.lease("")) else None


def _told(error: ValidationError) -> str:
    details = error.errors(include_url=False, include_input=False)
    told = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}".removeprefix(": ") for each in details[:_SHOWN]]
    return "; ".join(told) + (f"; and {len(details) - _SHOWN} more" if len(details) > _SHOWN else "")
