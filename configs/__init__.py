"""Configuration: one file a stage has its knobs, `schema` composes them, `loader` and `stored` read them."""

from configs.loader import ConfigError, changed, differences, flatten, load, read_stored, to_yaml
from configs.schema import Config
from configs.stored import up_to_date

__all__ = ["Config", "ConfigError", "changed", "differences", "flatten", "load", "read_stored", "to_yaml", "up_to_date"]
