"""Shared by every test: the package comes first, so that mmdet finds its operators whatever a test imports."""

import mrla_mm  # noqa: F401
