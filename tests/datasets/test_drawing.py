"""Shapes against their formulas, and scenes against painting them again."""

import cv2
import numpy as np
import pytest

from mrla_mm.datasets.drawing import CLASSES, MIN_PIXELS, MIN_VISIBLE, draw_scene, shape_mask

RADIUS, CENTRE, ANGLE = 40.0, (61.3, 58.8), 0.7


def vertices(name: str) -> np.ndarray:
    """Corners of a straight-edged shape, by hand, in units of its radius and before it is turned."""
    turn = np.arange(5) * 2 * np.pi / 5
    tips, notches = (
        np.stack([np.cos(turn), np.sin(turn)], 1),
        0.45 * np.stack([np.cos(turn + np.pi / 5), np.sin(turn + np.pi / 5)], 1),
    )
    w, e = 0.28, 0.95
    return {
        "rectangle": np.array([[-0.84, -0.54], [0.84, -0.54], [0.84, 0.54], [-0.84, 0.54]]),
        "triangle": np.array([[0, -1], [3**0.5 / 2, 0.5], [-(3**0.5) / 2, 0.5]]),
        "star": np.stack([tips, notches], 1).reshape(-1, 2),
        "cross": np.array(
            [[w, w], [w, e], [-w, e], [-w, w], [-e, w], [-e, -w], [-w, -w], [-w, -e], [w, -e], [w, -w], [e, -w], [e, w]]
        ),
    }[name]


@pytest.mark.parametrize("name", ["rectangle", "triangle", "star", "cross"])
def test_straight_shapes_match_a_filled_polygon(name):
    mask = shape_mask(name, 120, 130, centre=CENTRE, radius=RADIUS, angle=ANGLE)
    cos, sin = np.cos(ANGLE), np.sin(ANGLE)
    corners = RADIUS * vertices(name) @ np.array([[cos, sin], [-sin, cos]]) + CENTRE
    reference = np.zeros((1200, 1300), np.uint8)
    cv2.fillPoly(reference, [np.round(corners * 10).astype(np.int32)], 1)
    coverage = reference.reshape(120, 10, 130, 10).mean((1, 3))
    assert mask[coverage > 0.95].all()
    assert not mask[coverage < 0.05].any()


@pytest.mark.parametrize(("name", "inner"), [("circle", 0.0), ("ring", 0.55)])
def test_round_shapes_have_the_area_of_their_formula(name, inner):
    mask = shape_mask(name, 120, 130, centre=CENTRE, radius=RADIUS, angle=ANGLE)
    assert mask.sum() == pytest.approx(np.pi * RADIUS**2 * (1 - inner**2), rel=0.01)
    assert mask[58, 61] == (inner == 0)


@pytest.mark.parametrize("name", CLASSES)
def test_a_shape_beyond_the_border_is_cut_off(name):
    whole = shape_mask(name, 200, 200, centre=(100, 100), radius=30, angle=ANGLE)
    cut = shape_mask(name, 100, 90, centre=(10, 95), radius=30, angle=ANGLE)
    np.testing.assert_array_equal(cut, whole[5:105, 90:180])


def scenes(count: int):
    for seed in range(count):
        yield draw_scene(96, 128, rng=np.random.default_rng(seed), crowd=seed % 3 == 0, empty=False)


def test_visible_is_what_repainting_leaves():
    hidden = 0
    for _, instances in scenes(20):
        owner = np.full((96, 128), -1)
        for index, instance in enumerate(instances):
            owner[instance.full] = index
        for index, instance in enumerate(instances):
            np.testing.assert_array_equal(instance.visible, owner == index)
            hidden += np.count_nonzero(instance.full & ~instance.visible)
    assert hidden > 1000, "the scenes do not overlap, so this test shows nothing"


def test_every_shape_stays_recognisable():
    for _, instances in scenes(20):
        assert all(each.visible.sum() >= max(MIN_PIXELS, MIN_VISIBLE * each.full.sum()) for each in instances)


def test_a_crowd_is_many_shapes_and_an_empty_scene_has_none():
    _, instances = draw_scene(128, 128, rng=np.random.default_rng(5), crowd=True, empty=True)
    (swarm,) = instances
    assert swarm.crowd
    parts, _ = cv2.connectedComponents(swarm.full.astype(np.uint8))
    assert parts > 8
    _, instances = draw_scene(128, 128, rng=np.random.default_rng(5), crowd=False, empty=True)
    assert instances == []
