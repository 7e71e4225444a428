"""Shapes against their formulas, and scenes against painting them again."""

import cv2
import numpy as np
import pytest

from mrla_mm.datasets.drawing import CLASSES, MIN_PIXELS, MIN_VISIBLE, draw_scene, shape_mask

AREAS = {  # of shapes of radius 1, by hand
    "circle": np.pi,
    "rectangle": 4 * 0.84 * 0.54,
    "triangle": 3 * 3**0.5 / 4,
    "star": 10 * 0.45 * np.sin(np.pi / 5) / 2,
    "ring": np.pi * (1 - 0.55**2),
    "cross": 4 * 0.28 * (2 * 0.95 - 0.28),
}


@pytest.mark.parametrize("name", CLASSES)
def test_shapes_have_the_area_of_their_formula_and_are_cut_off_at_the_border(name):
    whole = shape_mask(name, 200, 200, centre=(100, 100), radius=40, angle=0.7)
    assert whole.sum() == pytest.approx(AREAS[name] * 40**2, rel=0.01)
    cut = shape_mask(name, 100, 90, centre=(10, 95), radius=40, angle=0.7)
    np.testing.assert_array_equal(cut, whole[5:105, 90:180])


def test_visible_is_what_repainting_leaves_and_enough_to_recognise():
    hidden = 0
    for seed in range(20):
        _, instances = draw_scene(96, 128, rng=np.random.default_rng(seed), crowd=seed % 3 == 0, empty=False)
        owner = np.full((96, 128), -1)
        for index, instance in enumerate(instances):
            owner[instance.full] = index
        for index, instance in enumerate(instances):
            np.testing.assert_array_equal(instance.visible, owner == index)
            hidden += np.count_nonzero(instance.full & ~instance.visible)
            assert instance.visible.sum() >= max(MIN_PIXELS, MIN_VISIBLE * instance.full.sum())
    assert hidden > 1000, "the scenes do not overlap, so this test shows nothing"


def test_a_crowd_is_many_shapes_and_an_empty_scene_has_none():
    _, instances = draw_scene(128, 128, rng=np.random.default_rng(5), crowd=True, empty=True)
    (swarm,) = instances
    assert swarm.crowd
    parts, _ = cv2.connectedComponents(swarm.full.astype(np.uint8))
    assert parts > 8
    _, instances = draw_scene(128, 128, rng=np.random.default_rng(5), crowd=False, empty=True)
    assert instances == []
