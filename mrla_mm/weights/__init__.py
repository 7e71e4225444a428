"""Weights: safe reading, strict loading with a table, key layouts and conversion."""

from mrla_mm.weights.backbone import PretrainedBackbone
from mrla_mm.weights.conversion import convert
from mrla_mm.weights.files import read_checkpoint
from mrla_mm.weights.hooks import CheckpointCheckHook
from mrla_mm.weights.layouts import KeyLayout
from mrla_mm.weights.loading import KeyStatus, LoadReport, load_weights
