"""Parameters are those of the contract, and arguments without effect are refused."""

import pytest

from mrla_mm import attention
from mrla_mm.errors import InputError

from .stages import CLASSES, SOFTMAX_AND_KERNEL

PROJECTIONS = {"query.weight": (1, 1, 3), "key.weight": (1, 1, 3)}
VALUE = {"value.weight": (24, 1, 3, 3)}
SCALE = {"history_scale": (24,)}


def shapes(module):
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, PROJECTIONS | VALUE | SCALE),
        ({"first_in_stage": True}, PROJECTIONS | VALUE | SCALE),
        ({"previous": "output"}, PROJECTIONS | VALUE | SCALE),
        ({"previous": "output", "first_in_stage": True}, PROJECTIONS | VALUE),
        ({"previous": "none"}, PROJECTIONS | VALUE),
        ({"learnable_lambda": False}, PROJECTIONS | VALUE),
        ({"value": "identity"}, PROJECTIONS | SCALE),
        ({"gated": False, "previous": "none"}, VALUE),
        ({"kernel_size": 9}, {"query.weight": (1, 1, 9), "key.weight": (1, 1, 9)} | VALUE | SCALE),
        (
            {"projection": "linear"},
            {"query.weight": (24, 24), "key.weight": (24, 24)} | VALUE | SCALE,
        ),
        (
            {"projection": "linear", "reduction": 4},
            {"query.weight": (6, 24), "key.weight": (6, 24)} | VALUE | SCALE,
        ),
    ],
)
def test_parameters_of_light(arguments, wanted):
    module = attention.MRLALight(24, head_channels=8, **arguments)
    assert shapes(module) == wanted
    assert set(module.state_dict()) == set(wanted)


@pytest.mark.parametrize("name", SOFTMAX_AND_KERNEL)
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, PROJECTIONS | VALUE),
        ({"first_in_stage": True}, PROJECTIONS | VALUE),
        ({"value": "identity"}, PROJECTIONS),
        (
            {"projection": "linear", "reduction": 2},
            {"query.weight": (12, 24), "key.weight": (12, 24)} | VALUE,
        ),
    ],
)
def test_parameters_of_the_other_classes(name, arguments, wanted):
    assert shapes(getattr(attention, name)(24, head_channels=8, **arguments)) == wanted


BAD = [
    ({"head_channels": 10}, "head_channels=10"),
    ({"head_channels": 0}, "head_channels=0"),
    ({"value": "conv"}, "value='conv'"),
    ({"projection": "mlp"}, "projection='mlp'"),
    ({"kernel_size": 4}, "kernel_size=4"),
    ({"reduction": 2}, "reduction=2"),  # the 1D convolution keeps every channel
    ({"projection": "linear", "kernel_size": 3}, "kernel_size=3"),  # a matrix has no kernel
    (
        {"projection": "linear", "reduction": 3},
        "reduction=3",
    ),  # 24 / 3 is whole, a head of 8 / 3 is not
]

BAD_FOR_LIGHT = [
    ({"previous": "earlier"}, "earlier"),
    ({"previous": "none", "learnable_lambda": False}, "learnable_lambda=False"),
    ({"gated": False, "kernel_size": 5}, "kernel_size"),
    ({"gated": False, "projection": "linear", "reduction": 2}, "gated=False"),
]


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [(name, *case) for name in CLASSES for case in BAD]
    + [("MRLALight", *case) for case in BAD_FOR_LIGHT],
    ids=str,
)
def test_bad_arguments_are_named(name, arguments, named):
    with pytest.raises(InputError, match=named):
        getattr(attention, name)(24, **({"head_channels": 8} | arguments))
