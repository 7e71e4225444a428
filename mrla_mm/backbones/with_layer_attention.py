"""Layer attention in any backbone: the public `WithLayerAttention`."""

import inspect
import re

from mmengine.logging import print_log
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import nn

from mrla_mm.attention import (
    AttentionConfig,
    AttentionResidual,
    attention_config,
    stage_pattern,
)
from mrla_mm.backbones.branches import add_branches, make_class
from mrla_mm.backbones.runs import Run, Size, find_runs
from mrla_mm.errors import InputError
from mrla_mm.registry import register
from mrla_mm.weights.backbone import PretrainedBackbone, pretrained_entries

# How published files name the keys of a class; see mrla_mm.weights.
KEY_LAYOUTS = {
    "mmdet.models.backbones.resnet.ResNet": "resnet",
    "mmdet.models.backbones.swin.SwinTransformer": "swin",
    "mmdet.models.backbones.pvt.PyramidVisionTransformer": "pvtv2",
    "mmpretrain.models.backbones.swin_transformer.SwinTransformer": "mmpretrain_swin",
}


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
        hosts = [f"{host.__module__}.{host.__name__}" for host in type(self).__mro__]
        return next((KEY_LAYOUTS[host] for host in hosts if host in KEY_LAYOUTS), None)


@register(MODELS)
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
    restore_init_cfg(model, kwargs.get("init_cfg"))
    if attention is None:
        return model
    if any(isinstance(module, AttentionResidual) for module in model.modules()):
        raise InputError(f"backbone={backbone!r} already has layer attention: use it as it is")
    norm_cfg = arguments.get("norm_cfg")
    if not isinstance(norm_cfg, dict) or norm_cfg.get("type") == "LN":
        norm_cfg = dict(type="BN")  # over maps
    options = dict(norm_cfg=norm_cfg, drop_path=attention_drop_path, zero_init=zero_init_attention)
    runs = find_runs(model, arguments.get("in_channels", 3), probe_size)
    with MODELS.switch_scope_and_registry(scope or None):
        for run in choose_runs(host, runs, pattern):
            add_branches(model, run, attention, options)
    model.train(model.training)  # frozen stages and norms freeze the branches too
    return model


def find_host(backbone: str | type) -> tuple[type, str]:
    """Return the class of a backbone, and the scope in its name or of its package."""
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
    package = host.__module__.partition(".")[0]
    return host, scope or (package if package in MODELS.children else "")


def default_arguments(host: type) -> dict[str, object]:
    """Return the arguments of a class and its bases with their defaults."""
    defaults = {}
    for base in reversed(host.__mro__):
        parameters = inspect.signature(base.__init__).parameters.values()
        defaults |= {parameter.name: parameter.default for parameter in parameters}
    return defaults


def restore_init_cfg(model: nn.Module, given: dict | None) -> None:
    """Set the `init_cfg` that mmdet's DetectoRS drops; as there, its file may lack tensors."""
    if isinstance(getattr(model, "pretrained", None), str) and not pretrained_entries(model):
        file = dict(type="Pretrained", checkpoint=model.pretrained, strict=False)
        model.init_cfg = file | (given or {})


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
