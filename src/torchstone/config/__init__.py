"""Settings: what they are (schema), where they come from (load)."""

from torchstone.config.load import load_config, to_dict
from torchstone.config.schema import Config

__all__ = ["Config", "load_config", "to_dict"]
