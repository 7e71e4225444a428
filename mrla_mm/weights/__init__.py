"""Weights: reading files safely, strict loading with a report, key layouts, and the checks before a run."""

from mrla_mm.weights.checks import check_weights
from mrla_mm.weights.files import read_checkpoint
from mrla_mm.weights.initializer import StrictPretrained
from mrla_mm.weights.loading import LoadReport, load_weights

__all__ = ["LoadReport", "StrictPretrained", "check_weights", "load_weights", "read_checkpoint"]
