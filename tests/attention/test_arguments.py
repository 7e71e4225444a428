"""Parameters are those of the contract, and arguments without effect are refused."""

import pytest

from mrla_mm import attention
from mrla_mm.errors import InputError


def projections(*shape):
    return {"query.weight": shape, "key.weight": shape}


CONV1D = projections(1, 1, 3)
VALUE = {"value.weight": (24, 1, 3, 3)}
SCALE = {"history_scale": (24,)}
LIGHT = [
    (dict(), CONV1D | VALUE | SCALE),
    (dict(first_in_stage=True), CONV1D | VALUE | SCALE),
    (dict(previous="output"), CONV1D | VALUE | SCALE),
    (dict(previous="output", first_in_stage=True), CONV1D | VALUE),
    (dict(previous="none"), CONV1D | VALUE),
    (dict(learnable_lambda=False), CONV1D | VALUE),
    (dict(gated=False, previous="none"), VALUE),
    (dict(kernel_size=9), projections(1, 1, 9) | VALUE | SCALE),
    (dict(projection="linear"), projections(24, 24) | VALUE | SCALE),
]
OTHERS = [
    (dict(), CONV1D | VALUE),
    (dict(value="identity"), CONV1D),
    (dict(projection="linear", reduction=2), projections(12, 24) | VALUE),
]
PARAMETERS = [("MRLALight", *case) for case in LIGHT]
for kind in ("MRLABase", "MLA", "LinearRLA"):
    PARAMETERS += [(kind, *case) for case in OTHERS]


@pytest.mark.parametrize(("kind", "arguments", "wanted"), PARAMETERS)
def test_parameters(kind, arguments, wanted):
    state = getattr(attention, kind)(24, head_channels=8, **arguments).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == wanted


SIZES = {4: 1, 8: 3, 64: 3, 96: 3, 128: 5, 1280: 5, 2048: 7, 32768: 9}  # 8: 4 / 2 = 2, raised to 3


@pytest.mark.parametrize(("channels", "size"), SIZES.items())
def test_kernel_size_by_the_eca_rule(channels, size):
    module = attention.MRLALight(channels, head_channels=1)
    assert module.query.weight.shape == module.key.weight.shape == (1, 1, size)


BAD = [
    (dict(head_channels=10), "head_channels=10"),
    (dict(head_channels=0), "head_channels=0"),
    (dict(value="conv"), "value='conv'"),
    (dict(projection="mlp"), "projection='mlp'"),
    (dict(kernel_size=4), "kernel_size=4"),
    (dict(reduction=2), "reduction=2"),  # the 1D convolution keeps every channel
    (dict(projection="linear", kernel_size=3), "kernel_size=3"),  # a matrix has no kernel
    (dict(projection="linear", reduction=3), "reduction=3"),  # 24 / 3 is whole, 8 / 3 is not
    (dict(previous="earlier"), "earlier"),
    (dict(previous="none", learnable_lambda=False), "learnable_lambda=False"),
    (dict(gated=False, kernel_size=5), "kernel_size"),
    (dict(gated=False, projection="linear", reduction=2), "gated=False"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=str)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        attention.MRLALight(24, **(dict(head_channels=8) | arguments))
