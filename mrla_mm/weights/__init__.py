"""Weights: the checks before a run."""

from mrla_mm.weights.checks import check_weights

__all__ = ["check_weights"]
