"""The checks of the audit, one module each; importing this package registers them all.

Each module has a function from `AuditEvidence` to `Measured` and registers it (`registry`) under the name of its knob
in `configs/audit.py`. The function notes its cases in the database and returns one value, which `tasks.audit.run`
compares with the knob's threshold. `shares` has the checks' common case: the highest share among all data sets.
"""

import importlib
import pkgutil

from tasks.audit.checks.registry import CHECKS, AuditCheck, AuditEvidence, Measured, SkippedError, register_check

__all__ = ["CHECKS", "AuditCheck", "AuditEvidence", "Measured", "SkippedError", "register_check"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
