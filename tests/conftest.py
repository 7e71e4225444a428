"""Shared by every test: the package comes first, so that mmdet finds its operators whatever a test imports."""

import torch

import mrla_mm  # noqa: F401

torch.set_num_threads(1)  # on tensors this small more threads only wait for each other
