"""Data sets: the checks before a run, and the generated shapes of the quick start."""

from mrla_mm.datasets.checks import check_datasets
from mrla_mm.datasets.hooks import DatasetCheckHook
from mrla_mm.datasets.shapes import generate_shapes

__all__ = ["DatasetCheckHook", "check_datasets", "generate_shapes"]
