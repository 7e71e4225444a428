"""Skips what tests the stand-in ops where mmcv brings compiled ones."""

import pytest

from mrla_mm import compat

needs_stand_in = pytest.mark.skipif(
    not compat.ext.is_stand_in(),
    reason="compiled mmcv is installed, with which test_against_compiled compares",
)
