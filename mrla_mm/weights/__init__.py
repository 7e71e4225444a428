"""Weights: reading and writing files safely, strict loading with a report, key layouts, and the checks before a run."""

from mrla_mm.weights.backbone import PretrainedBackbone
from mrla_mm.weights.checkpointing import AtomicCheckpointHook
from mrla_mm.weights.checks import check_checkpoint, check_weights, without_pretrained
from mrla_mm.weights.conversion import convert
from mrla_mm.weights.files import read_checkpoint
from mrla_mm.weights.hooks import CheckpointCheckHook
from mrla_mm.weights.initializer import StrictPretrained
from mrla_mm.weights.loading import LoadReport, load_weights
from mrla_mm.weights.publishing import publishable, save_published, stem_of

__all__ = [
    "AtomicCheckpointHook",
    "CheckpointCheckHook",
    "LoadReport",
    "PretrainedBackbone",
    "StrictPretrained",
    "check_checkpoint",
    "check_weights",
    "convert",
    "load_weights",
    "publishable",
    "read_checkpoint",
    "save_published",
    "stem_of",
    "without_pretrained",
]
