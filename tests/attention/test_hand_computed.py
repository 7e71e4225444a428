"""Cases worked out on paper: small numbers, every expected value written out."""

import math

import pytest
import torch

from mrla_mm import attention

LN3 = math.log(3)  # sigmoid(ln 3) = 3/4; softmax of (0, ln 3) = (1/4, 3/4)


def block(name, channels, *, query=None, key=None, taps=None, scale=None, value_kernel=None, **arguments):
    """A float64 module; `taps`: centre taps of the depthwise convolution, the other taps are zero."""
    module = getattr(attention, name)(channels, **arguments).to(torch.float64)
    with torch.no_grad():
        for conv, weight in ((module.query, query), (module.key, key)):
            conv.weight.copy_(torch.tensor(weight, dtype=torch.float64).reshape(conv.weight.shape))
        if taps is not None:
            module.value.weight.zero_()
            module.value.weight[:, 0, 1, 1] = torch.tensor(taps, dtype=torch.float64)
        if value_kernel is not None:
            module.value.weight.copy_(torch.tensor(value_kernel, dtype=torch.float64).expand(channels, 1, 3, 3))
        if scale is not None:
            module.history_scale.copy_(torch.tensor(scale, dtype=torch.float64))
    return module


def pixel(*channels):
    """A 1x1 map of one image."""
    return torch.tensor(channels, dtype=torch.float64).reshape(1, -1, 1, 1)


def assert_map(got, wanted):
    wanted = torch.tensor(wanted, dtype=torch.float64).reshape(got.shape)
    torch.testing.assert_close(got, wanted, rtol=1e-14, atol=1e-14)


def run(modules, xs, shortcuts=None):
    memory, outputs = None, []
    for module, x, shortcut in zip(modules, xs, shortcuts or xs, strict=True):
        out, memory = module(x, shortcut, memory)
        outputs.append(out)
    return outputs


def test_light_zero_query_halves_the_value_and_adds_the_scaled_shortcut():
    module = block("MRLALight", 2, head_channels=2, query=[0], key=[1], taps=[2, 4], scale=[7, -1])
    out, _ = module(pixel(3, 5), pixel(1, 10), None)
    assert_map(out, [0.5 * 6 + 7 * 1, 0.5 * 20 - 1 * 10])  # 10, 0


def test_light_gate_divides_by_the_root_of_the_head_width():
    # A head of four ones: q . k = 4 (ln 3 / 2), over sqrt(4): ln 3, gate 3/4. With the key's sign turned: gate 1/4.
    options = dict(head_channels=4, kernel_size=1, previous="none")
    module = block("MRLALight", 8, query=[LN3 / 2], key=[1], taps=[4] * 8, **options)
    out, _ = module(pixel(1, -1, 1, 1, 0, 0, 0, 0), pixel(*[99] * 8), None)
    assert_map(out, [3, -3, 3, 3, 0, 0, 0, 0])
    with torch.no_grad():
        module.key.weight.fill_(-1)
    out, _ = module(pixel(0, 0, 0, 0, 1, 1, -1, 1), pixel(*[99] * 8), None)
    assert_map(out, [0, 0, 0, 0, 1, 1, -1, 1])


def test_light_heads_are_runs_of_consecutive_channels():
    # Head (1, 1) scores 2 (ln 3 / sqrt 2) / sqrt 2 = ln 3; head (0, 1) half of it: gate 1 / (1 + 3^-0.5).
    options = dict(head_channels=2, kernel_size=1, previous="none")
    module = block("MRLALight", 4, query=[LN3 / math.sqrt(2)], key=[1], taps=[4] * 4, **options)
    out, _ = module(pixel(1, 1, 0, 1), pixel(0, 0, 0, 0), None)
    assert_map(out, [3, 3, 0, 4 / (1 + 3**-0.5)])


def test_conv1d_reads_the_channel_that_its_tap_stands_for():
    # Last tap: q_c = ln 3 y_(c+1), zero beyond the last channel. Gates 3/4, 3/4, 1/2 (turned round: 1/2, 3/4, 3/4).
    options = dict(head_channels=1, kernel_size=3, previous="none")
    module = block("MRLALight", 3, query=[0, 0, LN3], key=[0, 1, 0], taps=[4, 4, 4], **options)
    out, _ = module(pixel(1, 1, 1), pixel(0, 0, 0), None)
    assert_map(out, [3, 3, 2])


def test_depthwise_taps_and_zero_border():
    kernel = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    module = block("MRLABase", 1, head_channels=1, query=[3], key=[2], value_kernel=kernel)
    impulse = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    impulse[0, 0, 1, 1] = 1
    out, _ = module(impulse, impulse, None)
    assert_map(out, [[9, 8, 7], [6, 5, 4], [3, 2, 1]])
    row = torch.ones(1, 1, 1, 3, dtype=torch.float64)
    out, _ = module(row, row, None)
    assert_map(out, [5 + 6, 4 + 5 + 6, 4 + 5])


def test_light_last_output_recurrence():
    # 0.5 v: 3, 4; then 1 + 2 * 3, 2 - 4; then 5 + 10 * 7, 0 + 0.5 * (-2). The shortcut plays no part.
    options = dict(head_channels=2, query=[0], key=[1], taps=[2, 2], previous="output")
    cases = ((True, None), (False, [2, -1]), (False, [10, 0.5]))
    modules = [block("MRLALight", 2, first_in_stage=first, scale=scale, **options) for first, scale in cases]
    outputs = run(modules, [pixel(3, 4), pixel(1, 2), pixel(5, 0)], [pixel(99, 99)] * 3)
    for out, wanted in zip(outputs, ([3, 4], [7, -2], [75, -1]), strict=True):
        assert_map(out, wanted)


# Query and key of the second block: x^1 . x^2 scores 0 or ln 3 after the division by sqrt(4).
SECOND = {"head_channels": 4, "kernel_size": 1, "query": [LN3 / 2], "key": [1], "taps": [8] * 4}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("MRLABase", [1 + 6, 1 + 6, -1 + 6, -1 + 6]),  # 1/4 of 4 x^1 and 3/4 of 8 x^2
        ("MLA", [2 + 6, 2 + 6, -2 + 6, -2 + 6]),  # 1/4 of 8 x^1 and 3/4 of 8 x^2
    ],
)
def test_softmax_weights_and_whose_value_function_acts(name, wanted):
    first = block(name, 4, head_channels=4, kernel_size=1, query=[1], key=[100], taps=[4] * 4)
    outputs = run([first, block(name, 4, **SECOND)], [pixel(1, 1, -1, -1), pixel(1, 1, 1, 1)])
    assert_map(outputs[1], wanted)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("MRLABase", [3 + 2] * 4),  # key 2 of block 1 scores 2 ln 3: 3/4 of 4 and 1/4 of 8
        ("MLA", [8] * 4),  # both layers pass through block 2's key and value
    ],
)
def test_whose_key_function_acts(name, wanted):
    first = block(name, 4, head_channels=4, kernel_size=1, query=[1], key=[2], taps=[4] * 4)
    outputs = run([first, block(name, 4, **SECOND)], [pixel(1, 1, 1, 1)] * 2)
    assert_map(outputs[1], wanted)


def test_softmax_survives_scores_beyond_the_range_of_exp():
    modules = [block("MRLABase", 1, head_channels=1, query=[1e4], key=[1], taps=[1]) for _ in range(2)]
    outputs = run(modules, [pixel(1), pixel(2)])  # scores 2e4 and 4e4
    assert_map(outputs[1], [2])


def test_linear_rla_feature_map_and_normaliser():
    # phi(k) = (2, 3) and (7, 8). A zero query has phi = (1, 1): weights 5 and 15 of 20.
    first = block("LinearRLA", 2, head_channels=2, query=[0], key=[1], taps=[4, 4])
    second = block("LinearRLA", 2, head_channels=2, query=[0], key=[1], taps=[4, 4])
    outputs = run([first, second], [pixel(1, 2), pixel(6, 7)])
    assert_map(outputs[0], [4, 8])
    assert_map(outputs[1], [1 + 18, 2 + 21])
    with torch.no_grad():
        second.query.weight.fill_(1)  # phi(q) = (7, 8): weights 7*2 + 8*3 = 38 and 49 + 64 = 113 of 151
    outputs = run([first, second], [pixel(1, 2), pixel(6, 7)])
    assert_map(outputs[1], [(38 * 4 + 113 * 24) / 151, (38 * 8 + 113 * 28) / 151])


def test_linear_rla_negative_side_of_the_feature_map():
    # phi(-ln 3) = 1/3 beside phi(0) = 1: weights 1/4 and 3/4 of the values 4 ln 3 and 0.
    first = block("LinearRLA", 1, head_channels=1, query=[0], key=[-1], taps=[4])
    second = block("LinearRLA", 1, head_channels=1, query=[5], key=[1], taps=[4])
    assert_map(run([first, second], [pixel(LN3), pixel(0)])[1], [LN3])


SIZES = {4: 1, 8: 3, 64: 3, 96: 3, 128: 5, 256: 5, 1280: 5, 2048: 7, 8192: 7, 32768: 9}  # 8: 4 / 2 = 2, raised to 3


@pytest.mark.parametrize(("channels", "size"), SIZES.items())
def test_kernel_size_by_the_eca_rule(channels, size):
    module = attention.MRLALight(channels, head_channels=1)
    assert module.query.weight.shape == module.key.weight.shape == (1, 1, size)
