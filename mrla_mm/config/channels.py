"""A backbone's output channels against what the neck behind it expects, where the backbone is a ResNet."""

from collections.abc import Mapping

from mmengine.registry import MODELS

from mrla_mm.config.signatures import from_host
from mrla_mm.errors import InputError

RESNETS = ("ResNet", "ResNetV1d", "ResNeXt", "MRLAResNet", "MRLAResNetV1d")


def check_channels(model: Mapping, *, scope: str | None = None) -> None:
    """Refuse a neck whose `in_channels` are not what the ResNet before it puts out.

    Other backbones are not judged, nor are necks of the user's own, which may take what they like of the maps.

    Raises:
        InputError: names both lists, and the option that mends it.
    """
    neck, name = model.get("neck"), "model.neck"
    if isinstance(neck, list | tuple) and neck:
        neck, name = neck[0], "model.neck.0"
    expected = neck.get("in_channels") if isinstance(neck, Mapping) else None
    if not isinstance(expected, list | tuple) or not from_host(kind_of(neck, scope)):
        return
    given = output_channels(model.get("backbone"), scope)
    if given is None or list(expected) == given:
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


def output_channels(backbone: object, scope: str | None) -> list[int] | None:
    """Return the channels of each map that a ResNet puts out, None for other backbones and unusual values.

    Only mmdet's blocks have an `expansion`; mmpretrain's ResNets choose it when built, and are not judged.
    """
    kind = kind_of(backbone, scope)
    if not from_host(kind) or kind.__name__ not in RESNETS:
        return None
    depth, base = backbone.get("depth"), backbone.get("base_channels", 64)
    levels = backbone.get("out_indices", (0, 1, 2, 3))
    if not isinstance(depth, int) or depth not in kind.arch_settings or not isinstance(base, int):
        return None
    expansion = getattr(kind.arch_settings[depth][0], "expansion", None)
    if expansion is None or not isinstance(levels, list | tuple) or not all(isinstance(i, int) for i in levels):
        return None
    return [base * 2**level * expansion for level in levels]
