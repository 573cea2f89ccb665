"""Settings: their definition (schema.py) and how they are loaded (load.py)."""

from torchstone.config.load import load_config, to_dict
from torchstone.config.schema import Config

__all__ = ["Config", "load_config", "to_dict"]
