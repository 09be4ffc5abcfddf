"""Configuration: one file a stage has its knobs, `schema` composes them, `loader` and `stored` read them."""

from configs.loader import ConfigError, available, differences, flatten, load, read_stored, to_yaml, unknown
from configs.schema import Config
from configs.stored import as_begun, up_to_date, with_knobs

__all__ = [
    "Config",
    "ConfigError",
    "as_begun",
    "available",
    "differences",
    "flatten",
    "load",
    "read_stored",
    "to_yaml",
    "unknown",
    "up_to_date",
    "with_knobs",
]
