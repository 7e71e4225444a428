"""A backbone's output channels against what the neck behind it expects, where the backbone is a ResNet."""

from collections.abc import Mapping

from mmengine.registry import MODELS

from mrla_mm.errors import InputError

RESNETS = ("ResNet", "ResNetV1d", "ResNeXt", "MRLAResNet", "MRLAResNetV1d")


def check_channels(model: Mapping, *, scope: str | None = None) -> None:
    """Refuse a neck whose `in_channels` are not what the ResNet before it puts out; other backbones are not judged.

    Raises:
        InputError: names both lists, and the option that mends it.
    """
    neck, name = model.get("neck"), "model.neck"
    if isinstance(neck, list | tuple) and neck:
        neck, name = neck[0], "model.neck.0"
    expected = neck.get("in_channels") if isinstance(neck, Mapping) else None
    given = output_channels(model.get("backbone"), scope)
    if given is None or not isinstance(expected, list | tuple) or list(expected) == given:
        return
    backbone = model["backbone"]
    values = ",".join(map(str, given))
    raise InputError(
        f"model.backbone ({backbone['type']}, depth={backbone['depth']}) puts out {len(given)} maps of {given} "
        f"channels, but {name}.in_channels={list(expected)}: set --cfg-options {name}.in_channels=[{values}] "
        "(or the same in the config), or give the backbone another depth, base_channels or out_indices"
    )


def output_channels(backbone: object, scope: str | None) -> list[int] | None:
    """Return the channels of each map that a ResNet puts out, None for other backbones and unusual values."""
    kind = backbone.get("type") if isinstance(backbone, Mapping) else None
    if isinstance(kind, str):
        with MODELS.switch_scope_and_registry(backbone.get("_scope_") or scope) as registry:
            kind = registry.get(kind)
    settings = getattr(kind, "arch_settings", {}) if getattr(kind, "__name__", "") in RESNETS else {}
    depth, base, levels = (backbone or {}).get("depth"), None, None
    if depth in settings:
        base, levels = backbone.get("base_channels", 64), backbone.get("out_indices", (0, 1, 2, 3))
    if not isinstance(base, int) or not isinstance(levels, list | tuple) or not all(isinstance(i, int) for i in levels):
        return None
    return [base * 2**level * settings[depth][0].expansion for level in levels]
