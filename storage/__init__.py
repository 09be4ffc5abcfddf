"""Versions in object storage: the contract between the stages.

errors, layout, records   every error, every name of an object, and every row that stages exchange
processes/                how processes are started, and how they end with this one; interrupts.py ends this one
objects/                  whole objects by key, in a local folder or on S3, with put-if-absent
logs/                     numbered entries that are created once: catalog, leases, nights
versions/                 what is committed: manifests, drafts, data sets, checkpoints; aliases that point at versions
maintenance/              verify, repair, gc and doctor
commands/                 `python -m storage`

Each of these imports only those above it. `versions.drafts` commits a version: data objects first, then an entry in the
catalog, then the manifest with put-if-absent. A version without a manifest does not exist.
"""

import os
import signal
import sys

# Ctrl-C ends the process at once while Python imports the module of `python -m`, before `storage.interrupts.run`.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
