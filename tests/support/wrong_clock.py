"""A clock that is wrong, in this process."""

import time
from datetime import datetime, timedelta

import botocore.auth


def set_clock_ahead(seconds: float) -> None:
    """Set this process's idea of the time, and that with which it signs requests to S3; not the monotonic clock."""
    true, signed = time.time, botocore.auth.get_current_datetime

    def shifted(remove_tzinfo: bool = True) -> datetime:
        moment: datetime = signed(remove_tzinfo) + timedelta(seconds=seconds)
        return moment

    time.time = lambda: true() + seconds
    botocore.auth.get_current_datetime = shifted
