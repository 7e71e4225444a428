"""A backbone's output channels against what the neck behind it expects, where the backbone is a ResNet."""

from collections.abc import Collection, Mapping

from mmengine.registry import MODELS

from mrla_mm.config.signatures import from_host
from mrla_mm.errors import InputError

RESNETS = ("ResNet", "ResNetV1d", "ResNeXt", "MRLAResNet", "MRLAResNetV1d")
# Necks that take all maps of the backbone, `in_channels` in their order. Others are content with some of the maps
# (NASFPN, SSDNeck), with any order (HRFPN), or count from the last one (YOLOV3Neck).
NECKS = ("FPN", "FPN_CARAFE", "FPN_DropBlock", "PAFPN", "FPG", "ChannelMapper", "CSPNeXtPAFPN", "YOLOXPAFPN", "SSH")


def check_channels(model: Mapping, *, scope: str | None = None) -> None:
    """Refuse a neck whose `in_channels` are not what the ResNet before it puts out, at the levels that it uses.

    Other backbones and necks are not judged, nor are those of a detector of the user's own, which may lie anything
    between the two.

    Raises:
        InputError: names both lists, and the option that mends it.
    """
    neck, name = model.get("neck"), "model.neck"
    if isinstance(neck, list | tuple) and neck:
        neck, name = neck[0], "model.neck.0"
    if not is_judged(neck, NECKS, scope) or not from_host(kind_of(model, scope)):
        return
    expected, given = neck.get("in_channels"), output_channels(model.get("backbone"), scope)
    used = used_levels(neck)
    if given is None or used is None or not isinstance(expected, list | tuple):
        return
    if len(expected) == len(given) and list(expected[used]) == given[used]:
        return
    backbone = model["backbone"]
    values = ",".join(map(str, given))
    raise InputError(
        f"model.backbone ({backbone['type']}, depth={backbone['depth']}) puts out {len(given)} maps of {given} "
        f"channels, but {name}.in_channels={list(expected)}: set --cfg-options {name}.in_channels=[{values}] "
        "(or the same in the config), or give the backbone another depth, base_channels or out_indices"
    )


def kind_of(part: object, scope: str | None) -> object:
    """Return the class that the config of a part of the model means, None where it is not known."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str):
        with MODELS.switch_scope_and_registry(part.get("_scope_") or scope) as registry:
            kind = registry.get(kind)
    return kind


def is_judged(part: object, names: Collection[str], scope: str | None) -> bool:
    """Whether a part of the model is of one of these classes, and the class is a host's or ours."""
    kind = kind_of(part, scope)
    return from_host(kind) and kind.__name__ in names


def used_levels(neck: Mapping) -> slice | None:
    """Return which of the backbone's maps a neck of the FPN's kind makes convolutions for, None if it says nonsense."""
    start, end = neck.get("start_level", 0), neck.get("end_level", -1)
    if not isinstance(start, int) or not isinstance(end, int):
        return None
    return slice(start, None if end == -1 else end + 1)


def output_channels(backbone: object, scope: str | None) -> list[int] | None:
    """Return the channels of each map that a ResNet puts out, None for other backbones and unusual values.

    Only mmdet's blocks have an `expansion`; mmpretrain's ResNets choose it when built, and are not judged.
    """
    if not is_judged(backbone, RESNETS, scope):
        return None
    kind, depth, base = kind_of(backbone, scope), backbone.get("depth"), backbone.get("base_channels", 64)
    levels = backbone.get("out_indices", (0, 1, 2, 3))
    if not isinstance(depth, int) or depth not in kind.arch_settings or not isinstance(base, int):
        return None
    expansion = getattr(kind.arch_settings[depth][0], "expansion", None)
    if expansion is None or not isinstance(levels, list | tuple) or not all(isinstance(i, int) for i in levels):
        return None
    return [base * 2**level * expansion for level in sorted(set(levels))]  # they come in the order of the stages
