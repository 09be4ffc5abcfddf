"""Configuration: `schema` has all knobs, `loader` reads them, `stored` reads old ones; YAML files to start from."""

from configs.loader import ConfigError, available, differences, flatten, load, to_yaml
from configs.schema import Config
from configs.stored import as_begun, read_stored, unknown, up_to_date

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
]
