"""Layer attention in any backbone: where it goes is found by what the blocks do.

A run is what shares a memory: consecutive blocks of one class in one container that return maps of
one shape. Each of its blocks gets a residual branch as `block.mrla`, which leaves all plain keys as
they are, and the container passes the memory on.
"""

import copy
import inspect
import re
from collections.abc import Iterator
from functools import cache, partial
from itertools import groupby
from typing import NamedTuple

import torch
from mmdet.models.backbones.resnet import ResNet
from mmdet.models.backbones.swin import SwinBlockSequence, SwinTransformer
from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor, nn

from mrla_mm.attention import LayerAttentionResidual, TokenAttentionResidual
from mrla_mm.backbones.checkpointing import run_checkpointed
from mrla_mm.errors import InputError
from mrla_mm.weights import PretrainedBackbone

PROBE_SIZE = 128  # pixels of the image of zeros that shows what the blocks do
LAYOUTS = {ResNet: "resnet", SwinTransformer: "swin"}  # of published files, see mrla_mm.weights
Shapes = tuple[torch.Size | None, torch.Size | None]  # of what a module takes first and returns


class Run(NamedTuple):
    """Consecutive blocks that share a memory."""

    container: str  # its name in the backbone
    blocks: range  # their places in it
    channels: int
    has_shortcut: bool  # whether the first block keeps the shape of what it takes


class Combined:
    """Mixin of the classes that `combine` makes, which pickle cannot find by a name."""

    def __reduce__(self) -> tuple:
        return new_object, type(self).__bases__, self.__dict__


@cache
def combine(mixin: type, host: type) -> type:
    """Make the subclass of a host's class in which a mixin comes first."""
    return type(f"{host.__name__}WithLayerAttention", (mixin, host), {})


def new_object(mixin: type, host: type) -> object:
    """Make an object of a combined class, still without attributes."""
    combined = combine(mixin, host)
    return combined.__new__(combined)


class MapRuns(Combined):
    """Mixin of an `nn.Sequential` over maps (B, C, H, W) with one run of blocks or several.

    A branch that starts a run has `starts_run`; `has_shortcut` tells whether its block keeps the
    shape of what it takes.
    """

    branch_type = LayerAttentionResidual
    channel_dim = 1

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks, each with the layer attention it may have."""
        memory = ()
        for block in self:
            out = block(x)
            branch = getattr(block, "mrla", None)
            if branch is None or branch.starts_run:
                memory = ()
            if branch is not None:
                shortcut = x if branch.has_shortcut else None
                with_cp = getattr(block, "with_cp", False)
                out, *memory = run_checkpointed(with_cp, branch, out, shortcut, *memory)
            x = out
        return x


class SwinRun(Combined):
    """Mixin of a stage of mmdet's Swin, whose blocks are one run over tokens (B, H * W, C)."""

    branch_type = TokenAttentionResidual
    channel_dim = 2

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> tuple:
        """Run the blocks with their layer attention, then merge patches as the host does."""
        memory = ()
        for block in self.blocks:
            out = block(x, hw_shape)
            x, *memory = run_checkpointed(block.with_cp, block.mrla, out, x, hw_shape, *memory)
        if self.downsample is None:
            return x, hw_shape, x, hw_shape
        return *self.downsample(x, hw_shape), x, hw_shape


CONTAINERS = {nn.Sequential: MapRuns, SwinBlockSequence: SwinRun}


def mixin_of(module: nn.Module) -> type | None:
    """Return the mixin for a container, None for other modules and for one with its own forward."""
    for kind, mixin in CONTAINERS.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return mixin
    return None


def blocks_of(container: nn.Module) -> tuple[str, nn.Module]:
    """Return the list of a container's blocks and the prefix of their names in it."""
    if isinstance(container, nn.Sequential):
        return "", container
    return "blocks.", container.blocks


def record_shapes(backbone: nn.Module, in_channels: int) -> dict[str, Shapes]:
    """Return the shapes at each module that a copy of a backbone calls; None for no tensor."""
    probe = copy.deepcopy(backbone)
    probe.eval()
    shapes = {}

    def shape(value: object) -> torch.Size | None:
        return value.shape if isinstance(value, Tensor) else None

    def record(name: str, module: nn.Module, taken: tuple, returned: object) -> None:
        shapes[name] = shape(taken[0]) if taken else None, shape(returned)

    for name, module in probe.named_modules():
        module.register_forward_hook(partial(record, name))
    with torch.no_grad():
        probe(next(probe.parameters()).new_zeros(1, in_channels, PROBE_SIZE, PROBE_SIZE))
    return shapes


def find_runs(backbone: nn.Module, in_channels: int) -> list[Run]:
    """Find the runs of a backbone; of nested ones the outer."""
    shapes = record_shapes(backbone, in_channels)
    runs = []
    inside = ()  # prefixes of the blocks found so far
    for name, container in backbone.named_modules():
        mixin = mixin_of(container)
        if mixin is None or name not in shapes or name.startswith(inside):
            continue
        prefix, blocks = blocks_of(container)
        names = [f"{name}.{prefix}{block}" for block, _ in blocks.named_children()]
        for places in consecutive(blocks, [shapes.get(block) for block in names]):
            taken, returned = shapes[names[places[0]]]
            runs.append(Run(name, places, returned[mixin.channel_dim], taken == returned))
            inside += tuple(f"{names[place]}." for place in places)
    return runs


def consecutive(blocks: nn.Module, shapes: list[Shapes | None]) -> Iterator[range]:
    """Yield the places of two or more consecutive blocks of one class and shape."""

    def class_and_shape(place: int) -> tuple:
        return type(blocks[place]), shapes[place] and shapes[place][1]

    for (kind, shape), group in groupby(range(len(blocks)), class_and_shape):
        first, *others = group
        # an nn.Sequential would run the branch as a step of its own, and a plain layer is no block
        is_block = not issubclass(kind, nn.Sequential) and len(blocks[first]._modules) > 0
        if shape is not None and is_block and others:
            yield range(first, others[-1] + 1)


class AnyBackbone(Combined, PretrainedBackbone):
    """Mixin of a backbone that `WithLayerAttention` builds: strict pretrained weights."""

    @property
    def optional_parts(self) -> list[str]:
        """Norms of the outputs, which files of classifiers lack; a batch norm is none of them."""
        kinds = nn.LayerNorm, nn.GroupNorm
        names = [f"norm{index}" for index in range(4)]
        return [name for name in names if isinstance(getattr(self, name, None), kinds)]

    @property
    def key_layout(self) -> str | None:
        """Name of the layout of published files."""
        return next((name for host, name in LAYOUTS.items() if isinstance(self, host)), None)


@MODELS.register_module(force=True)
def WithLayerAttention(  # a function, by the name that configs know
    backbone: str | type,
    layer_attention: dict | None = None,
    *,
    stages: str = ".*",
    attention_drop_path: float = 0.0,
    zero_init_attention: bool = True,
    **kwargs: object,
) -> nn.Module:
    """Build any backbone of OpenMMLab with layer attention (MRLA, ICLR 2023) in its runs of blocks.

    It is an object of a subclass of the backbone's own class. Its shortcut is a block's input;
    where that has another shape than the output, as in the first block of many stages, the layer
    has none. The branches' norms are of the backbone's own `norm_cfg`, over tokens LayerNorm.

    Args:
        backbone: name or class of the backbone, such as "CSPNeXt" or "mmpretrain.ConvNeXt".
        layer_attention: config of the variant, by default ``dict(type="MRLALight")``.
        stages: regular expression for the names of containers; only those that it matches entirely
            get layer attention. The log names them.
        attention_drop_path: see `MRLAResNet`.
        zero_init_attention: see `MRLAResNet`.
        **kwargs: those of the backbone. A `norm_cfg` that it does not take is for the branches.

    Raises:
        InputError: the backbone has no run, or none that `stages` matches.

    Example:
        >>> from mmengine.registry import MODELS
        >>> cfg = dict(type="WithLayerAttention", backbone="mmdet.ResNeXt", depth=50, groups=32)
        >>> backbone = MODELS.build(cfg)
    """
    host, scope = backbone, ""
    if isinstance(backbone, str):
        scope = backbone.rpartition(".")[0]
        with MODELS.switch_scope_and_registry(None) as registry:
            host = registry.get(backbone)
    if not (isinstance(host, type) and issubclass(host, BaseModule)):
        raise InputError(
            f"backbone={backbone!r} is unknown or not a plain backbone derived from BaseModule; "
            'those of other packages have their scope before the name, as "mmpretrain.ConvNeXt"'
        )
    if kwargs.get("rfp_inplanes"):
        raise InputError(
            f"rfp_inplanes={kwargs['rfp_inplanes']}: a recursive feature pyramid calls the blocks "
            "one by one, without layer attention; leave rfp_backbone as it is"
        )
    norm_cfg = branch_norm(host, kwargs)
    model = combine(AnyBackbone, host)(**kwargs)
    runs = choose_runs(model, find_runs(model, kwargs.get("in_channels", 3)), stages)
    options = dict(drop_path=attention_drop_path, zero_init=zero_init_attention)
    with MODELS.switch_scope_and_registry(scope or None):
        for run in runs:
            add_branches(model, run, layer_attention or dict(type="MRLALight"), norm_cfg, options)
    model.train(model.training)  # frozen stages and norms freeze the branches too
    return model


def branch_norm(host: type, kwargs: dict) -> dict:
    """Return the norm of the branches: the backbone's own, else the one that only they take."""
    for base in host.__mro__:
        parameters = inspect.signature(base.__init__).parameters
        if "norm_cfg" in parameters:
            return kwargs.get("norm_cfg", parameters["norm_cfg"].default)
    return kwargs.pop("norm_cfg", dict(type="BN"))


def choose_runs(model: nn.Module, runs: list[Run], stages: str) -> list[Run]:
    """Return the runs in the containers that a pattern matches, and log them."""
    if not runs:
        raise InputError(
            f"{type(model).__bases__[1].__name__} has no run of blocks for layer attention: two or "
            "more consecutive blocks of one class in an nn.Sequential, or in a stage of mmdet's "
            "Swin, that return maps of one shape. A deeper network of its family may have one, and "
            "HorNet needs with_cp=False; docs/extending.md shows how to call layer attention from "
            "a backbone of your own"
        )
    chosen = [run for run in runs if re.fullmatch(stages, run.container)]
    if not chosen:
        names = ", ".join(dict.fromkeys(run.container for run in runs))
        raise InputError(f"stages={stages!r} matches none of {names}")
    for run in chosen:
        blocks = f"{len(run.blocks)} blocks, {run.channels} channels"
        print_log(f"layer attention in {run.container}: {blocks}", logger="current")
    return chosen


def add_branches(
    model: nn.Module, run: Run, layer_attention: dict, norm_cfg: dict, options: dict
) -> None:
    """Give each block of a run its branch, and its container the forward that calls it."""
    container = model.get_submodule(run.container)
    if not isinstance(container, Combined):
        container.__class__ = combine(mixin_of(container), type(container))
    if container.branch_type is TokenAttentionResidual:
        norm_cfg = None  # its own LayerNorm
    _, blocks = blocks_of(container)
    for place in run.blocks:
        starts = place == run.blocks[0]
        branch = container.branch_type(
            layer_attention, run.channels, norm_cfg=norm_cfg, first_in_stage=starts, **options
        )
        branch.starts_run = starts
        branch.has_shortcut = run.has_shortcut or not starts
        if not branch.has_shortcut and hasattr(branch.attention, "remove_shortcut"):
            branch.attention.remove_shortcut()
        blocks[place].mrla = branch
