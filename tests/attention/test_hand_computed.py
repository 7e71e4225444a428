"""A case of each class worked out on paper, which guards the step-by-step reference too."""

import math

import pytest
import torch

from mrla_mm import attention

from .stages import run

LN3 = math.log(3)  # sigmoid(ln 3) = 3/4; softmax of (0, ln 3) = (1/4, 3/4)


def block(name, channels, *, query, key, tap, **arguments):
    """A float64 module of one head, whose convolutions are products by a number."""
    module = getattr(attention, name)(channels, kernel_size=1, **arguments).double()
    with torch.no_grad():
        module.query.weight.fill_(query)
        module.key.weight.fill_(key)
        module.value.weight.zero_()
        module.value.weight[:, 0, 1, 1] = tap
    return module


def pixel(*channels):
    """A 1x1 map of one image."""
    return torch.tensor(channels, dtype=torch.float64).reshape(1, -1, 1, 1)


def assert_map(got, wanted):
    torch.testing.assert_close(got, pixel(*wanted), rtol=1e-14, atol=1e-14)


def test_light_gate_divides_by_the_root_of_the_head_width():
    # A head of four ones: q . k = 4 (ln 3 / 2), over sqrt(4): ln 3, gate 3/4. With the key's sign
    # turned: gate 1/4.
    module = block("MRLALight", 8, query=LN3 / 2, key=1, tap=4, head_channels=4, previous="none")
    out, _ = module(pixel(1, -1, 1, 1, 0, 0, 0, 0), pixel(*[99] * 8), None)
    assert_map(out, [3, -3, 3, 3, 0, 0, 0, 0])
    with torch.no_grad():
        module.key.weight.fill_(-1)
    out, _ = module(pixel(0, 0, 0, 0, 1, 1, -1, 1), pixel(*[99] * 8), None)
    assert_map(out, [0, 0, 0, 0, 1, 1, -1, 1])


# Of layer 2's scores 0 and ln 3: 1/4 of 4 x^1 (base) or 8 x^1 (MLA), and 3/4 of 8 x^2.
@pytest.mark.parametrize(("name", "first"), [("MRLABase", 1), ("MLA", 2)])
def test_softmax_weights_and_whose_value_function_acts(name, first):
    blocks = [
        block(name, 4, query=1, key=100, tap=4, head_channels=4),
        block(name, 4, query=LN3 / 2, key=1, tap=8, head_channels=4),
    ]
    xs = [pixel(1, 1, -1, -1), pixel(1, 1, 1, 1)]
    assert_map(run(blocks, xs, xs)[1], [first + 6, first + 6, 6 - first, 6 - first])


def test_linear_rla_feature_map_and_normaliser():
    # phi(k) = (2, 3) and (7, 8). A zero query has phi = (1, 1): weights 5 and 15 of 20.
    blocks = [block("LinearRLA", 2, query=0, key=1, tap=4, head_channels=2) for _ in range(2)]
    xs = [pixel(1, 2), pixel(6, 7)]
    outputs = run(blocks, xs, xs)
    assert_map(outputs[0], [4, 8])
    assert_map(outputs[1], [1 + 18, 2 + 21])
    with torch.no_grad():
        blocks[1].query.weight.fill_(1)  # phi(q) = (7, 8): weights 38 and 113 of 151
    assert_map(run(blocks, xs, xs)[1], [(38 * 4 + 113 * 24) / 151, (38 * 8 + 113 * 28) / 151])


SIZES = {4: 1, 8: 3, 64: 3, 96: 3, 128: 5, 1280: 5, 2048: 7, 32768: 9}  # 8: 4 / 2 = 2, raised to 3


@pytest.mark.parametrize(("channels", "size"), SIZES.items())
def test_kernel_size_by_the_eca_rule(channels, size):
    module = attention.MRLALight(channels, head_channels=1)
    assert module.query.weight.shape == module.key.weight.shape == (1, 1, size)
