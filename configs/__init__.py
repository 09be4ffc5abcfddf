"""Configuration: the typed page of knobs (`schema`), the loader, and YAML files to start from."""

from configs.loader import ConfigError, available, differences, flatten, load, to_yaml
from configs.schema import Config

__all__ = ["Config", "ConfigError", "available", "differences", "flatten", "load", "to_yaml"]
