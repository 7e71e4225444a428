"""Every argument acts or is refused; parameters are exactly those that the contract names."""

import pytest
import torch

from mrla_mm import attention
from mrla_mm.errors import InputError

from .stages import CLASSES, SOFTMAX_AND_KERNEL, build_blocks, random_maps, run

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
        ({"projection": "linear"}, {"query.weight": (24, 24), "key.weight": (24, 24)} | VALUE | SCALE),
        ({"projection": "linear", "reduction": 4}, {"query.weight": (6, 24), "key.weight": (6, 24)} | VALUE | SCALE),
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
        ({"projection": "linear", "reduction": 2}, {"query.weight": (12, 24), "key.weight": (12, 24)} | VALUE),
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
    ({"projection": "linear", "reduction": 3}, "reduction=3"),  # 24 / 3 is whole, a head of 8 / 3 is not
]


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [(name, *case) for name in CLASSES for case in BAD] + [("MRLALight", {"previous": "earlier"}, "earlier")],
    ids=str,
)
def test_bad_arguments_are_named(name, arguments, named):
    with pytest.raises(InputError, match=named):
        getattr(attention, name)(24, **({"head_channels": 8} | arguments))


def stage_of(name, arguments):
    """Parameter shapes and, under one draw of the parameters, the last outputs of a stage; None where refused."""
    torch.manual_seed(3)
    xs, shortcuts = (random_maps(3, (2, 24, 3, 5)) for _ in range(2))
    try:
        blocks = build_blocks(name, 3, 24, **({"head_channels": 8} | arguments))
    except ValueError:
        return None
    for block in blocks:
        for parameter_name, parameter in block.named_parameters():
            torch.manual_seed(len(parameter_name))
            torch.nn.init.normal_(parameter)
    with torch.no_grad():
        return [shapes(block) for block in blocks], run(blocks, xs, shortcuts)


def same(one, other):
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


COMMON = [
    ({}, {"head_channels": 12}),
    ({}, {"value": "identity"}),
    ({}, {"projection": "linear"}),
    ({}, {"kernel_size": 5}),
    ({"projection": "linear"}, {"reduction": 2}),
]
OF_LIGHT = [
    *COMMON,
    ({}, {"previous": "output"}),
    ({}, {"previous": "none"}),
    ({}, {"learnable_lambda": False}),
    ({}, {"gated": False}),
    ({"previous": "output"}, {"learnable_lambda": False}),
    ({"previous": "none"}, {"learnable_lambda": False}),
    ({"gated": False}, {"kernel_size": 5}),
    ({"gated": False}, {"projection": "linear"}),
    ({"gated": False, "projection": "linear"}, {"reduction": 2}),
]


@pytest.mark.parametrize(
    ("name", "arguments", "change"),
    [("MRLALight", *case) for case in OF_LIGHT] + [(name, *case) for name in SOFTMAX_AND_KERNEL for case in COMMON],
    ids=str,
)
def test_no_argument_is_silent(name, arguments, change):
    """Each change alters parameters or outputs of a stage, or the combination is refused."""
    before, after = stage_of(name, arguments), stage_of(name, arguments | change)
    silent = before is not None and after is not None and same(before, after)
    assert not silent
