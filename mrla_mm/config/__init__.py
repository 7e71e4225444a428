"""Configs: reading a file with errors that name its line, and checks of the finished config before a run."""

from mrla_mm.config.channels import check_channels
from mrla_mm.config.files import read_file
from mrla_mm.config.keys import check_keys
from mrla_mm.config.locating import locate_config
from mrla_mm.config.parts import check_parts

__all__ = ["check_channels", "check_keys", "check_parts", "locate_config", "read_file"]
