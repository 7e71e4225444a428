"""Data sets: the checks before a run."""

from mrla_mm.datasets.checks import check_datasets
from mrla_mm.datasets.hooks import DatasetCheckHook

__all__ = ["DatasetCheckHook", "check_datasets"]
