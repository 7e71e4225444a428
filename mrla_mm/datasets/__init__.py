"""Data sets: the check before a run, and the generated shapes of the quick start."""

from mrla_mm.datasets.checks import DatasetCheckHook
from mrla_mm.datasets.shapes import generate_shapes
