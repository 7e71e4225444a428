"""Channels of a detector's parts against each other: a ResNet's and its neck's, a neck's and the heads' behind it."""

from collections.abc import Collection, Iterator, Mapping

from mrla_mm.arguments import class_of
from mrla_mm.config.signatures import from_host
from mrla_mm.errors import InputError

RESNETS = ("ResNet", "ResNetV1d", "ResNeXt", "MRLAResNet")
# Necks that take all maps of the backbone, `in_channels` in their order. Others are content with some of the maps
# (NASFPN, SSDNeck), with any order (HRFPN), or count from the last one (YOLOV3Neck).
NECKS = ("FPN", "FPN_CARAFE", "FPN_DropBlock", "PAFPN", "FPG", "ChannelMapper", "CSPNeXtPAFPN", "YOLOXPAFPN", "SSH")
# Necks whose maps all have `out_channels`; heads of whole maps and of regions, with all that is derived from them; and
# the heads of a region.
PYRAMIDS = (*(name for name in NECKS if name != "SSH"), "NASFPN", "NASFCOS_FPN", "HRFPN", "RFP", "SimpleFeaturePyramid")
DENSE_HEADS = ("AnchorHead", "AnchorFreeHead", "YOLOXHead")
EXTRACTORS = ("SingleRoIExtractor",)
ROI_HEADS = ("StandardRoIHead", "CascadeRoIHead")
REGION_HEADS = {
    "bbox": ("Shared2FCBBoxHead", "Shared4Conv1FCBBoxHead", "ConvFCBBoxHead"),
    "mask": ("FCNMaskHead", "HTCMaskHead"),
}


def check_channels(model: Mapping, *, scope: str | None = None) -> None:
    """Refuse a neck that does not take the maps of the ResNet before it, and a head that does not take the neck's.

    Other backbones, necks and heads are not judged, nor are those of a detector of the user's own, which may lie
    anything between the two.

    Raises:
        InputError: names both sides, and the option that mends it.
    """
    if from_host(class_of(model, scope)):
        check_neck(model, scope)
        check_heads(model, scope)


def check_neck(model: Mapping, scope: str | None) -> None:
    """Refuse a neck whose `in_channels` are not what the ResNet before it puts out, at the levels that it uses."""
    neck, name = model.get("neck"), "model.neck"
    if isinstance(neck, list | tuple) and neck:
        neck, name = neck[0], "model.neck.0"
    if not is_judged(neck, NECKS, scope):
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


def check_heads(model: Mapping, scope: str | None) -> None:
    """Refuse heads, and extractors of regions, for maps of other channels than the one neck before them puts out."""
    neck = model.get("neck")
    if not is_judged(neck, PYRAMIDS, scope) or not isinstance(given := neck.get("out_channels"), int):
        return
    expected = [*dense_channels(model, scope), *region_channels(model.get("roi_head"), scope)]
    wrong = dict.fromkeys(f"{place}={value}" for place, value in expected if isinstance(value, int) and value != given)
    if wrong:
        options = " ".join(f"{each.partition('=')[0]}={given}" for each in wrong)
        raise InputError(
            f"model.neck ({neck['type']}) puts out maps of out_channels={given}, but {', '.join(wrong)}: set "
            f"--cfg-options {options} (or the same in the config), or give the neck other out_channels"
        )


def dense_channels(model: Mapping, scope: str | None) -> Iterator[tuple[str, object]]:
    """Yield place and value of what heads that see whole maps say of the maps' channels."""
    for key in ("bbox_head", "rpn_head"):
        if is_judged(model.get(key), DENSE_HEADS, scope, derived=True):
            yield f"model.{key}.in_channels", model[key].get("in_channels")


def region_channels(roi_head: object, scope: str | None) -> Iterator[tuple[str, object]]:
    """Yield place and value of what extractors of regions, and the heads behind them, say of the maps' channels.

    With one map, an extractor does not look at its `out_channels`; a `shared_head` stands between it and the heads.
    """
    if not is_judged(roi_head, ROI_HEADS, scope, derived=True):
        return
    for kind, names in REGION_HEADS.items():
        key = f"{kind}_roi_extractor" if roi_head.get(f"{kind}_roi_extractor") else "bbox_roi_extractor"
        extractors = parts_at(roi_head, key)
        if all(is_judged(each, EXTRACTORS, scope) and has_levels(each) for _, each in extractors):
            yield from ((f"{place}.out_channels", each.get("out_channels")) for place, each in extractors)
            heads = [] if roi_head.get("shared_head") else parts_at(roi_head, f"{kind}_head")
            judged = [(place, each) for place, each in heads if is_judged(each, names, scope)]
            yield from ((f"{place}.in_channels", each.get("in_channels")) for place, each in judged)


def parts_at(roi_head: Mapping, key: str) -> list[tuple[str, object]]:
    """Return the parts that a key holds, one or one for each stage of a cascade, with their places."""
    part, place = roi_head.get(key), f"model.roi_head.{key}"
    if isinstance(part, list | tuple):
        return [(f"{place}.{index}", each) for index, each in enumerate(part)]
    return [(place, part)]


def has_levels(extractor: Mapping) -> bool:
    """Whether an extractor of regions is one for several maps."""
    strides = extractor.get("featmap_strides")
    return isinstance(strides, list | tuple) and len(strides) > 1


def is_judged(part: object, names: Collection[str], scope: str | None, *, derived: bool = False) -> bool:
    """Whether a part of the model is of one of these classes, or derived from one, and its class a host's or ours."""
    kind = class_of(part, scope)
    kinds = getattr(kind, "__mro__", ()) if derived else (kind,)
    return from_host(kind) and any(each.__name__ in names for each in kinds)


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
    kind, depth, base = class_of(backbone, scope), backbone.get("depth"), backbone.get("base_channels", 64)
    levels = backbone.get("out_indices", (0, 1, 2, 3))
    if not isinstance(depth, int) or depth not in kind.arch_settings or not isinstance(base, int):
        return None
    expansion = getattr(kind.arch_settings[depth][0], "expansion", None)
    if expansion is None or not isinstance(levels, list | tuple) or not all(isinstance(i, int) for i in levels):
        return None
    return [base * 2**level * expansion for level in sorted(set(levels))]  # they come in the order of the stages
