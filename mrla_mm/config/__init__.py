"""Configs: reading a file with errors that name its line, and checks of the finished config before a run."""

from mrla_mm.config.channels import check_channels
from mrla_mm.config.files import read_file
from mrla_mm.config.keys import check_keys
from mrla_mm.config.locating import locate_config

__all__ = ["check_channels", "check_keys", "locate_config", "read_file"]
