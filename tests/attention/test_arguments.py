"""Arguments have the effect that they say, and those without effect are refused."""

import pytest

from mrla_mm import attention
from mrla_mm.errors import InputError

SIZES = {4: 1, 8: 3, 64: 3, 96: 3, 128: 5, 1280: 5, 2048: 7, 32768: 9}  # 8: 4 / 2 = 2, raised to 3
PROJECTIONS = [(channels, {}, (1, 1, size)) for channels, size in SIZES.items()]
PROJECTIONS += [(24, dict(kernel_size=9), (1, 1, 9)), (24, dict(projection="linear"), (24, 24))]
PROJECTIONS += [(24, dict(projection="linear", reduction=2), (12, 24))]


@pytest.mark.parametrize("kind", ["MRLALight", "MRLABase", "MLA", "LinearRLA"])
@pytest.mark.parametrize(("channels", "options", "shape"), PROJECTIONS, ids=str)
def test_shapes_of_query_and_key(channels, options, shape, kind):
    module = getattr(attention, kind)(channels, head_channels=4, **options)
    assert module.query.weight.shape == module.key.weight.shape == shape


BAD = [
    (dict(head_channels=10), "head_channels=10"),
    (dict(head_channels=0), "head_channels=0"),
    (dict(head_channels="a"), "head_channels='a'"),
    (dict(head_channels=2.0), "head_channels=2.0"),
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
