"""Backbones of mmdet, mmpretrain, mmsegmentation and timm under WithLayerAttention.

For each there is one of three words: right, refused (with an InputError of ours) or plain (which
fails without layer attention too). The tests take a few that differ in kind; run as a module,
`python -m tests.backbones.test_every_backbone`, this file takes all of them and prints the table of
docs/every_backbone.md.
"""

import copy
import re
import sys
import tempfile
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mrla_mm.attention import TokenAttentionResidual
from mrla_mm.errors import InputError
from mrla_mm.weights import load_weights

from ..conftest import ROOT
from .common import assert_equal, branches, levels, randomize_zero_init
from .small_hosts import ARGUMENTS, TIMM

PAGE = ROOT / "docs/every_backbone.md"
SIZES = (128, 224, 256)
WORDS = ("right", "refused", "plain")  # columns of the table


def names():
    """Names of all hosts with their scopes; timm's by that of the architecture."""
    found = []
    for library in ("mmdet", "mmpretrain", "mmseg"):
        import_module(f"{library}.models")
        for name, kind in import_module(f"{library}.registry").MODELS.module_dict.items():
            is_backbone = kind.__module__.startswith(f"{library}.models.backbones")
            if is_backbone and isinstance(kind, type) and name != "TIMMBackbone":
                found.append(f"{library}.{name}")
    return sorted(found) + [f"timm.{name}" for name in sorted(TIMM)]


def make(name, **ours):
    library, _, kind = name.partition(".")
    arguments = copy.deepcopy(ARGUMENTS.get(name, {}))
    if library == "timm":
        arguments = dict(model_name=kind, pretrained=False, **TIMM[kind])
        name = "mmpretrain.TIMMBackbone"
    init_default_scope(name.partition(".")[0])
    torch.manual_seed(0)
    kind = dict(type="WithLayerAttention", backbone=name) if ours else dict(type=name)
    try:
        return MODELS.build(kind | arguments)
    finally:
        init_default_scope("mmengine")


def usable_images(plain):
    """Draw a rectangle and a square that a plain backbone takes, or the one of them."""
    found = []
    for ratio in (2, 1):
        for side in SIZES:
            image = torch.rand(1, 3, side, ratio * side)
            try:
                levels(plain, image)
            except Exception:
                continue
            found.append(image)
            break
    if not found:
        raise RuntimeError("takes none of these images")
    return found


def classify(name, folder):
    """Return the word of a host and its numbers of runs and blocks."""
    try:
        plain = make(name)
        plain.init_weights()
        for parameter in plain.parameters():
            parameter.data.nan_to_num_()  # TridentConv's are whatever the memory held
        state = copy.deepcopy(plain.state_dict())  # some change their tables in a forward pass
        nn.Module.train(plain, False)
        with torch.no_grad():
            images = usable_images(plain)
    except Exception:
        with pytest.raises(Exception):  # noqa: B017, PT011
            make(name, ours=True)(torch.rand(1, 3, 224, 224))
        return "plain"
    try:
        ours = make(name, ours=True)
    except InputError:
        return "refused"
    torch.save(dict(state_dict=state), folder / "plain.pth")
    ours.init_weights()
    load_weights(ours, folder / "plain.pth", prefix="")
    nn.Module.train(ours, False)
    with torch.no_grad():
        for image in images:
            assert_equal(levels(copy.deepcopy(ours), image), levels(plain, image))
        other = nn.Module.train(make(name, ours=True), False)
        keys = other.load_state_dict(randomize_zero_init(ours).state_dict(), strict=False)
        assert not keys.unexpected_keys  # SwinV2 drops its tables from a file
        assert not any(".mrla." in key for key in keys.missing_keys)
        assert_equal(levels(other, images[0]), levels(ours, images[0]))
        assert_equal(levels(ours, images[0]), compose(plain, ours, images[0]))
    ours.train()
    trained = {key for key, p in ours.named_parameters() if p.requires_grad and ".mrla." not in key}
    assert trained == {key for key, p in plain.named_parameters() if p.requires_grad}
    found = levels(ours, torch.cat([images[-1], images[-1].flip(3)]))
    sum(level.float().square().mean() for level in found if level.requires_grad).backward()
    for key, parameter in ours.named_parameters():
        assert ".mrla." not in key or parameter.grad is not None, key
    return "right"


def compose(plain, ours, image):
    """Levels of a plain host with our branch behind each block, over what it took and returned."""
    taken = {}
    called = Counter()

    def before_block(block, args):
        taken[block] = args[0].clone()

    def after_block(branch, block, args, kwargs, out):
        called[branch] += 1
        inputs = [out, taken[block] if taken[block].shape == out.shape else None]
        if isinstance(branch, TokenAttentionResidual):
            grid = *args[1:], *kwargs.values()
            inputs.append(grid[0] if isinstance(grid[0], tuple | list) else grid[:2])
        return branch(*inputs)[0]

    for name, block in ours.named_modules():
        if "mrla" in block._modules:
            block_of_plain = plain.get_submodule(name)
            block_of_plain.register_forward_pre_hook(before_block)
            after = partial(after_block, block.mrla)
            block_of_plain.register_forward_hook(after, with_kwargs=True)
    found = levels(plain, image)
    assert called == dict.fromkeys(branches(ours), 1)
    return found


QUICK = ("mmdet.CSPNeXt", "mmdet.SwinTransformer", "mmpretrain.VAN", "mmpretrain.ViTSAM")
SLOW = (
    "mmdet.HRNet",  # branches at several resolutions
    "mmdet.SSDVGG",  # refused
    "mmdet.TridentResNet",  # one block at three dilations
    "mmpretrain.ShuffleNetV2",  # channels shuffled
    "mmpretrain.SparseConvNeXt",  # fails without layer attention too
    "mmpretrain.SwinTransformerV2",  # windows
    "mmpretrain.XCiT",  # tokens
    "mmseg.MixVisionTransformer",  # tokens whose grid is an argument
    "timm.convnext_atto",
    "timm.vit_tiny_patch16_224",  # refused
)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_right_or_refused_or_plain_fails_as_well(name, tmp_path):
    library, _, kind = name.partition(".")
    pytest.importorskip(library)
    row = re.search(rf"^\| {library} .*", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    cells = dict(zip(WORDS, row[0].split("|")[2:], strict=False))
    assert f"`{kind}`" in cells[classify(name, tmp_path)]


def write_table():
    """Write the table of docs/every_backbone.md."""
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names():
            library, _, kind = name.partition(".")
            row = table.setdefault(library, {word: [] for word in WORDS})
            row[classify(name, Path(folder))].append(f"`{kind}`")
    for library, row in table.items():
        cells = [", ".join(kinds) or "none" for kinds in row.values()]
        sys.stdout.write(f"| {' | '.join([library, *cells])} |\n")


if __name__ == "__main__":
    write_table()
