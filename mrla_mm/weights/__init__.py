"""Weights: safe reading, strict loading with a table, key layouts, conversion and publishing."""

from mrla_mm.weights.backbone import PretrainedBackbone
from mrla_mm.weights.files import read_checkpoint
from mrla_mm.weights.hooks import CheckpointCheckHook
from mrla_mm.weights.layouts import KeyLayout
from mrla_mm.weights.loading import Fate, LoadReport, load_weights
from mrla_mm.weights.publishing import convert, publishable, save_published, stem_of
