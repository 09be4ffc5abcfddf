"""Versions in object storage: records, layout, manifests, data sets and checkpoints. The contract between stages."""

import os

from storage import interrupts

interrupts.while_importing(__name__)

# Torch makes this folder when it is imported, and loads code that it compiled from there. By default it has a name in
# TMPDIR that another user may have taken before.
if os.access(os.path.expanduser("~"), os.W_OK):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser("~/.cache/math-mt-ppo/torchinductor"))
