"""Layer attention over tokens against Algorithms 2 and 4, step by step in float64."""

import pytest
import torch
from torch import nn

from mrla_mm.attention import MRLALight, TokenAttentionResidual
from mrla_mm.errors import InputError

from . import reference
from .stages import assert_same, named

LIGHT, BASE = dict(type="MRLALight"), dict(type="MRLABase")
LIGHT_OUTPUT = dict(LIGHT, previous="output")
CHANNELS, HEAD_CHANNELS, DEPTH = 32, 16, 3


def normalise(tokens, norm):
    centred = tokens - tokens.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-6) * norm.weight + norm.bias


def algorithms_2_and_4(branches, outputs, inputs, grid, extra):
    """Base and light on maps in which patch i * W + j stands at row i, column j."""

    def maps_of(tokens):
        return [each[:, extra:].transpose(1, 2).unflatten(2, grid) for each in tokens]

    normed = [normalise(x, branch.norm) for x, branch in zip(outputs, branches, strict=True)]
    blocks = [named(branch.attention) for branch in branches]
    function, options = reference.base, dict(head_channels=HEAD_CHANNELS)
    if type(branches[0].attention) is MRLALight:
        function = reference.light
        options |= dict(previous=branches[0].attention.previous, gelu=nn.functional.gelu)
        if options["previous"] == "shortcut":  # the block's input
            pairs = zip(inputs, branches, strict=True)
            inputs = [normalise(s, branch.history_norm) for s, branch in pairs]
    results = []
    attended = function(maps_of(normed), maps_of(inputs), blocks, **options)
    for x, n, out in zip(outputs, normed, attended, strict=True):
        results.append(x + torch.cat([n[:, :extra], out.flatten(2).transpose(1, 2)], 1))
    return results


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("grid", [(4, 4), (3, 7)], ids=["square", "3x7"])
@pytest.mark.parametrize("attention", [LIGHT, LIGHT_OUTPUT, BASE], ids=str)
def test_values_and_gradients_follow_the_algorithms(attention, grid, extra):
    torch.manual_seed(0)
    branches = nn.ModuleList(
        TokenAttentionResidual(attention, CHANNELS, extra_tokens=extra, first_in_stage=t == 0)
        for t in range(DEPTH)
    ).double()
    for name, parameter in branches.named_parameters():
        # without a norm's bias pooled features, hence all scores, would be close to zero
        nn.init.normal_(parameter, std=1.0 if name.endswith("norm.bias") else 0.7)
    shape = 2, extra + grid[0] * grid[1], CHANNELS
    tokens = [torch.randn(shape).double().requires_grad_() for _ in range(2 * DEPTH)]
    outputs, inputs = tokens[:DEPTH], tokens[DEPTH:]
    expected = algorithms_2_and_4(branches, outputs, inputs, grid, extra)
    memory, results = (), []
    for branch, x, s in zip(branches, outputs, inputs, strict=True):
        y, *memory = branch(x, s, grid, *memory)
        results.append(y)
    leaves = {f"token{t}": x for t, x in enumerate(tokens)} | dict(branches.named_parameters())
    for name, gradient in assert_same(results, expected, leaves, 1e-8).items():
        if name.startswith(f"{DEPTH - 1}."):  # base's first query has one layer to choose from
            assert gradient.abs().sum() > 0, f"the comparison does not reach {name}"


DEFAULTS = [(LIGHT, 12, True), (dict(type=MRLALight), 12, True), (BASE, 12, False)]
DEFAULTS += [(dict(LIGHT, head_channels=64, value="dwconv"), 3, False)]


@pytest.mark.parametrize(("cfg", "heads", "has_gelu"), DEFAULTS)
def test_defaults_on_tokens_are_the_papers(cfg, heads, has_gelu):
    attention = TokenAttentionResidual(cfg, 192).attention
    assert (attention.heads, attention.value_gelu) == (heads, has_gelu)


def test_drop_path_drops_extra_and_patch_tokens_together():
    branch = TokenAttentionResidual(LIGHT, CHANNELS, extra_tokens=1, drop_path=0.5, zero_init=False)
    torch.manual_seed(0)
    tokens, inputs = torch.randn(2, 64, 7, CHANNELS)
    changed = (branch(tokens, inputs, (2, 3))[0] != tokens).float().mean((1, 2))
    assert 0 < (changed > 0).sum() < 64
    assert ((changed < 0.01) | (changed > 0.99)).all()
    assert (branch.eval()(tokens, inputs, (2, 3))[0] != tokens).any(2).any(1).all()


def test_a_norm_without_scale_cannot_start_at_zero():
    with pytest.raises(InputError, match="no weight"):
        TokenAttentionResidual(LIGHT, 32, norm_cfg=dict(type="LN", elementwise_affine=False))
