"""The checks, one module each; importing this package registers them all."""

import importlib
import pkgutil

from tasks.audit.checks.registry import CHECKS, AuditCheck, AuditEvidence, Measured, SkippedError, register_check

__all__ = ["CHECKS", "AuditCheck", "AuditEvidence", "Measured", "SkippedError", "register_check"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
