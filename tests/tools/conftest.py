"""What the tests of several tools share."""

import cv2
import numpy as np
import pytest


@pytest.fixture
def images(tmp_path):
    """A folder of two small pictures of noise, a.png and b.jpg."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("a.png", "b.jpg"):
        cv2.imwrite(str(folder / name), rng.integers(0, 255, (48, 64, 3), dtype=np.uint8))
    return folder
