"""The knobs of models beside the policy, which are never trained."""

from typing import Annotated

from pydantic import Field

from configs.knobs import Knobs

CHECKPOINT = r"^[A-Za-z0-9][A-Za-z0-9._-]*@[0-9]{1,6}$"
"""A checkpoint of this store, `RUN@N`."""


class Teacher(Knobs):
    """The model whose probabilities `algorithm.type=opd` distils."""

    checkpoint: Annotated[str, Field(pattern=CHECKPOINT)]
    """`RUN@N`: checkpoint N of a run of this store, which is verified like any other. A model from elsewhere comes into
    the store as version 0 of a run: `policy.path=MODEL run.name=teacher run.iterations=0`. It must have the policy's
    tokenizer. The trainer computes with it, as with a reference policy."""


class Models(Knobs):
    teacher: Teacher | None = None
    """Teacher of the policy."""
