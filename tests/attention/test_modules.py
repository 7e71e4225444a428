"""Values and every gradient against the paper's equations, memory, and arguments."""

from functools import partial

import pytest
import torch
from torch import nn

from measure import saved_bytes
from mrla_mm.attention import MRLALight, TokenAttentionResidual
from mrla_mm.errors import InputError

from . import reference
from .stages import VARIANTS, Stage, assert_same, build_blocks, named, random_maps, run

STAGES = {
    "one block": dict(depth=1, batch=1, channels=24, head_channels=8, grid=(3, 7)),
    "single pixel": dict(depth=2, batch=3, channels=48, head_channels=12, grid=(1, 1)),
    "deep": dict(depth=4, batch=3, channels=24, head_channels=12, grid=(3, 7)),
}


@pytest.mark.parametrize("size", STAGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients(variant, size):
    stage = Stage(variant, **STAGES[size])
    assert_same(stage.run(), stage.run_reference(), stage.leaves)
    sum(out.sum() for out in stage.run()).backward()
    assert all(p.grad is not None for p in stage.blocks.parameters())


@pytest.mark.parametrize("head_channels", [1, 24])
@pytest.mark.parametrize("variant", ["light", "base (a)", "MLA (a)", "linear RLA"])
def test_heads_of_one_channel_and_of_all(variant, head_channels):
    stage = Stage(variant, **dict(STAGES["deep"], head_channels=head_channels))
    assert_same(stage.run(), stage.run_reference(), stage.leaves)


@pytest.mark.parametrize("name", ["MRLALight", "MRLABase", "MLA", "LinearRLA"])
def test_memory_for_backward_grows_linearly_with_depth(name):
    blocks, xs = build_blocks(name, 6, 48, 12), random_maps(6, (2, 48, 16, 16))
    saved = [saved_bytes(partial(run, blocks[:n], xs[:n], xs[:n]), blocks) for n in range(1, 7)]
    steps = torch.tensor(saved).double().diff()[1:] / xs[0].untyped_storage().nbytes()  # in maps
    assert (steps - steps[0]).abs().max() < 0.1, steps


SIZES = {4: 1, 8: 3, 64: 3, 96: 3, 128: 5, 1280: 5, 2048: 7, 32768: 9}  # 8: 4 / 2 = 2, raised to 3
PROJECTIONS = [(channels, {}, (1, 1, size)) for channels, size in SIZES.items()]
PROJECTIONS += [(24, dict(projection="linear"), (24, 24))]
PROJECTIONS += [(24, dict(projection="linear", reduction=2), (12, 24))]


@pytest.mark.parametrize(("channels", "options", "shape"), PROJECTIONS, ids=str)
def test_shapes_of_query_and_key(channels, options, shape):
    module = MRLALight(channels, head_channels=4, **options)
    assert module.query.weight.shape == module.key.weight.shape == shape


BAD = [
    (dict(head_channels=10), "head_channels=10"),
    (dict(head_channels=0), "head_channels=0"),
    (dict(value="conv"), "value='conv'"),
    (dict(projection="mlp"), "projection='mlp'"),
    (dict(reduction=2), "reduction=2"),  # the 1D convolution keeps every channel
    (dict(previous="earlier"), "earlier"),
    (dict(previous="none", learnable_lambda=False), "learnable_lambda=False"),
    (dict(gated=False, projection="linear", reduction=2), "gated=False"),
    (dict(projection="linear", reduction=0), "reduction=0"),
    (dict(projection="linear", reduction=48), "reduction=48"),  # leaves no channel
    (dict(gated="no"), "gated='no'"),
    (dict(learnable_lambda="no"), "learnable_lambda='no'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=str)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        MRLALight(24, **(dict(head_channels=8) | arguments))


LIGHT, BASE = dict(type="MRLALight"), dict(type="MRLABase")
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
@pytest.mark.parametrize("attention", [LIGHT, dict(LIGHT, previous="output"), BASE], ids=str)
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
