"""Layer attention in any backbone: its blocks carry the residual branch themselves.

Each block of a run (`mrla_mm.backbones.runs`) gets a residual branch as `block.mrla`, which leaves
all plain keys as they are. `add_mixin` then changes the block's class to a subclass, made on the
fly, that runs the block and the branch. For a variant with a memory it also changes the class of
the module that calls the blocks, so that the memory is passed on.
"""

import inspect
import re
from functools import cache

from mmdet.models.backbones.pvt import PyramidVisionTransformer
from mmdet.models.backbones.resnet import ResNet
from mmdet.models.backbones.swin import SwinBlockSequence, SwinTransformer
from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor, nn

from mrla_mm.attention import (
    AttentionConfig,
    AttentionResidual,
    LayerAttentionResidual,
    TokenAttentionResidual,
    attention_config,
    stage_pattern,
)
from mrla_mm.backbones.checkpointing import run_checkpointed
from mrla_mm.backbones.runs import Run, Size, find_grid, find_runs
from mrla_mm.errors import InputError
from mrla_mm.weights import PretrainedBackbone

# How published files name the keys of a class; see mrla_mm.weights.
KEY_LAYOUTS = {ResNet: "resnet", SwinTransformer: "swin", PyramidVisionTransformer: "pvtv2"}


@cache
def make_class(*parts: type) -> type:
    """Make the class with these bases, mixins and then a host's class; its objects pickle."""
    name = f"{parts[-1].__name__}WithLayerAttention"
    return type(name, parts, {"_mrla_parts": parts, "__reduce__": reduce_object})


def parts_of(cls: type) -> tuple[type, ...]:
    """Return what `make_class` made a class of; of any other the class itself."""
    return vars(cls).get("_mrla_parts", (cls,))


def reduce_object(made: object) -> tuple:
    """Return what pickle stores of an object: its class by parts, and its attributes."""
    return new_object, parts_of(type(made)), made.__dict__


def new_object(*parts: type) -> object:
    """Make an object of a class from `make_class`, still without attributes."""
    cls = make_class(*parts)
    return cls.__new__(cls)


def add_mixin(module: nn.Module, mixin: type) -> None:
    """Change a module's class to a subclass of it in which the mixin comes first."""
    module.__class__ = make_class(mixin, *parts_of(type(module)))


class ChannelsLastResidual(LayerAttentionResidual):
    """The residual branch over maps (B, H, W, C)."""

    def forward(self, x: Tensor, shortcut: Tensor | None, *memory: Tensor) -> tuple[Tensor, ...]:
        """Add the attention to x; its memory has maps (B, C, H, W)."""
        maps = [each if each is None else each.permute(0, 3, 1, 2) for each in (x, shortcut)]
        y, *memory = super().forward(*maps, *memory)
        return y.permute(0, 2, 3, 1), *memory


BRANCH_CLASSES = {
    "maps": LayerAttentionResidual,
    "maps, channels last": ChannelsLastResidual,
    "tokens": TokenAttentionResidual,
}


class BlockWithBranch:
    """Mixin of a block that carries its residual branch as `mrla`."""

    def run_branch(self, out: Tensor, x: Tensor, arguments: tuple, *memory: Tensor) -> tuple:
        """Run the branch on what the block returned for x and arguments; return y and memory."""
        branch = self.mrla
        inputs = [out, x if branch.has_shortcut else None]
        if isinstance(branch, TokenAttentionResidual):
            inputs.append(find_grid(out, arguments))
        return run_checkpointed(getattr(self, "with_cp", False), branch, *inputs, *memory)


class BlockWithoutMemory(BlockWithBranch):
    """Mixin of a block whose variant has no memory: it is called as the plain block is."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Run the block as its class does, then the branch."""
        out = super().forward(x, *args, **kwargs)
        return self.run_branch(out, x, (*args, *kwargs.values()))[0]


class HostArguments(tuple):
    """Arguments of the plain block after x, from a caller that passes the memory on."""


class BlockWithMemory(BlockWithBranch):
    """Mixin of a block whose variant has a memory, which its caller passes on."""

    # All is positional, since mmengine's activation_checkpointing passes no keywords.
    def forward(self, x: Tensor, args: object = None, *memory: Tensor) -> tuple[Tensor, ...]:
        """Run the block with x and args, then the branch; return y and memory."""
        if not isinstance(args, HostArguments):
            raise InputError(
                f"a {type(self).__name__} was called without a memory: call its container as a "
                "whole, or take an MRLALight that has none"
            )
        return self.run_branch(super().forward(x, *args), x, args, *memory)


class HiddenBranch:
    """Mixin of a block that is an nn.Sequential, of which its branch is not a step."""

    def __iter__(self):
        return (module for name, module in self._modules.items() if name != "mrla")

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SequentialCaller:
    """Mixin of an `nn.Sequential` that passes on the memory of its runs."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks; each run starts with an empty memory."""
        memory = ()
        for block in self:
            if isinstance(block, BlockWithMemory):
                if block.mrla.first_in_stage:
                    memory = ()
                x, *memory = block(x, HostArguments(), *memory)
            else:
                x = block(x)
        return x


class SwinCaller:
    """Mixin of a stage of mmdet's Swin, whose blocks are one run over tokens (B, H * W, C)."""

    def forward(self, x: Tensor, hw_shape: Size) -> tuple:
        """Run the blocks with their layer attention, then merge patches as the host does."""
        memory = ()
        for block in self.blocks:
            x, *memory = block(x, HostArguments((hw_shape,)), *memory)
        if self.downsample is None:
            return x, hw_shape, x, hw_shape
        return *self.downsample(x, hw_shape), x, hw_shape


CALLER_MIXINS = {nn.Sequential: SequentialCaller, SwinBlockSequence: SwinCaller}


class AnyBackbone(PretrainedBackbone):
    """Mixin of a backbone that `WithLayerAttention` builds: strict pretrained weights."""

    # mmpretrain's ViTs freeze in their constructor, and their `_freeze_stages` freezes the
    # embedding even at frozen_stages=-1
    freezes_from = 1

    @property
    def optional_parts(self) -> tuple[str, ...]:
        """Norms of the outputs, which classifiers' files lack; ResNet's `norm1` is in its stem."""
        kinds = nn.LayerNorm, nn.GroupNorm
        names = [f"norm{index}" for index in range(4)]
        return tuple(f"{name}." for name in names if isinstance(getattr(self, name, None), kinds))

    @property
    def key_layout(self) -> str | None:
        """How published files of the host name their keys, in terms of `mrla_mm.weights`."""
        return next((name for host, name in KEY_LAYOUTS.items() if isinstance(self, host)), None)


@MODELS.register_module(force=True)
def WithLayerAttention(  # a function, by the name that configs know
    backbone: str | type,
    layer_attention: AttentionConfig = "MRLALight",
    *,
    stages: str = ".*",
    attention_drop_path: float = 0.0,
    zero_init_attention: bool = True,
    probe_size: Size | None = None,
    **kwargs: object,
) -> nn.Module:
    """Build any backbone of OpenMMLab with layer attention (MRLA, ICLR 2023) in its runs of blocks.

    It is an object of a subclass of the backbone's own class. Its shortcut is a block's input;
    where that has another shape than the output, as in the first block of many stages, the layer
    has none. The branches' norms are of the backbone's own `norm_cfg`, over tokens LayerNorm.

    Args:
        backbone: name or class of the backbone, such as "CSPNeXt" or "mmpretrain.ConvNeXt".
        layer_attention: config of the variant, or its name alone. None or False for the plain
            backbone.
        stages: regular expression for the names of runs: of their containers, or of the first block
            among the backbone's own children. Only those that it matches entirely get layer
            attention. The log names them.
        attention_drop_path: see `MRLAResNet`.
        zero_init_attention: see `MRLAResNet`.
        probe_size: height and width of an image that the backbone takes, where none of those that
            are tried to find its blocks will do.
        **kwargs: those of the backbone. A `norm_cfg` that it does not take is for the branches.

    Raises:
        InputError: the backbone has no run, or none that `stages` matches; or the variant has a
            memory, which what calls the blocks of a run cannot pass on.

    Example:
        >>> from mmengine.registry import MODELS
        >>> cfg = dict(type="WithLayerAttention", backbone="mmdet.ResNeXt", depth=50, groups=32)
        >>> backbone = MODELS.build(cfg)
    """
    attention = attention_config(layer_attention)
    pattern = stage_pattern(stages)
    host, scope = find_host(backbone)
    defaults = default_arguments(host)
    arguments = defaults | kwargs
    if "norm_cfg" not in defaults:
        kwargs.pop("norm_cfg", None)
    if attention and kwargs.get("rfp_inplanes"):
        raise InputError(
            f"rfp_inplanes={kwargs['rfp_inplanes']}: a recursive feature pyramid calls other "
            "methods of the blocks, without layer attention; leave rfp_backbone as it is"
        )
    model = make_class(AnyBackbone, host)(**kwargs)
    if attention is None:
        return model
    if any(isinstance(module, AttentionResidual) for module in model.modules()):
        raise InputError(f"backbone={backbone!r} already has layer attention: use it as it is")
    norm_cfg = branch_norm(arguments.get("norm_cfg"))
    options = dict(norm_cfg=norm_cfg, drop_path=attention_drop_path, zero_init=zero_init_attention)
    runs = find_runs(model, arguments.get("in_channels", 3), probe_size)
    with MODELS.switch_scope_and_registry(scope or None):
        for run in choose_runs(host, runs, pattern):
            add_branches(model, run, attention, options)
    model.train(model.training)  # frozen stages and norms freeze the branches too
    return model


def find_host(backbone: str | type) -> tuple[type, str]:
    """Return the class of a backbone and the scope in its name."""
    host, scope = backbone, ""
    if isinstance(backbone, str):
        scope = backbone.rpartition(".")[0]
        with MODELS.switch_scope_and_registry(None) as registry:
            host = registry.get(backbone)
    if not (isinstance(host, type) and issubclass(host, BaseModule)):
        raise InputError(
            f"backbone={backbone!r} is not a plain backbone derived from BaseModule, or unknown: "
            "then install its package, and outside a config name its scope, as in mmdet.CSPNeXt"
        )
    return host, scope


def default_arguments(host: type) -> dict[str, object]:
    """Return the arguments of a class and its bases with their defaults."""
    defaults = {}
    for base in reversed(host.__mro__):
        parameters = inspect.signature(base.__init__).parameters.values()
        defaults |= {parameter.name: parameter.default for parameter in parameters}
    return defaults


def branch_norm(norm_cfg: object) -> dict:
    """Return the norm of branches over maps: norm_cfg if it is one for maps, else batch norm."""
    is_for_maps = isinstance(norm_cfg, dict) and norm_cfg.get("type") != "LN"
    return norm_cfg if is_for_maps else dict(type="BN")


def choose_runs(host: type, runs: list[Run], pattern: re.Pattern) -> list[Run]:
    """Return the runs whose names a pattern matches, and log them."""
    if not runs:
        raise InputError(
            f"{host.__name__} has no run of blocks for layer attention: consecutive blocks of one "
            "class, each over what the one before it returns and without overwriting it, maps or "
            "tokens (B, N, C) whose calls carry their grid (H, W); docs/extending.md shows how to "
            "call it from your own backbone"
        )
    chosen = [run for run in runs if pattern.fullmatch(run.name)]
    if not chosen:
        names = ", ".join(dict.fromkeys(run.name for run in runs))
        raise InputError(f"stages={pattern.pattern!r} matches none of {names}")
    for run in chosen:
        blocks = f"{len(run.blocks)} blocks, {run.blocks[0].channels} channels"
        print_log(f"layer attention in {run.name}: {blocks}", logger="current")
    return chosen


def add_branches(model: nn.Module, run: Run, attention: dict, options: dict) -> None:
    """Give each block of a run its branch, and let their caller pass on a memory."""
    for block in run.blocks:
        own = dict(first_in_stage=block is run.blocks[0], has_shortcut=block.keeps_shape)
        if block.layout == "tokens":
            own |= dict(norm_cfg=None, extra_tokens=block.extra_tokens)  # None for LayerNorm
        module = block.module
        module.mrla = BRANCH_CLASSES[block.layout](attention, block.channels, **options | own)
        if isinstance(module, nn.Sequential):
            add_mixin(module, HiddenBranch)
        has_memory = getattr(module.mrla.attention, "has_memory", True)
        add_mixin(module, BlockWithMemory if has_memory else BlockWithoutMemory)
    if any(isinstance(block.module, BlockWithMemory) for block in run.blocks):
        make_caller_pass_memory(model.get_submodule(run.blocks[0].caller), run, attention)


def make_caller_pass_memory(caller: nn.Module, run: Run, attention: dict) -> None:
    """Make the module that calls a run's blocks pass their memory on; InputError if it cannot."""
    for host, mixin in CALLER_MIXINS.items():
        if isinstance(caller, mixin):  # it calls another run too
            return
        if isinstance(caller, host) and type(caller).forward is host.forward:
            add_mixin(caller, mixin)
            return
    raise InputError(
        f"{attention['type']} hands a memory from block to block, which the "
        f"{type(caller).__name__} that calls {run.name} cannot pass on: take MRLALight with "
        'previous="shortcut" or "none", or leave this run out by stages='
    )
