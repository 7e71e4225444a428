"""torchvision's names for EfficientNet's parts, and the arguments its weights need.

torchvision has a stage of `features` for each width, mmdet a layer for each resolution. Where the width changes at the
same resolution, a layer holds two stages, so the names of its later blocks depend on how deep the first is.
"""

from collections.abc import Sequence

from torch import nn

EDGE_RESIDUAL = 1  # kind of a block in mmdet's layer_setting, the last entry of its row
CONVOLUTION = {"conv.": "0.", "bn.": "1."}
SQUEEZE = {"conv1.conv.": "fc1.", "conv2.conv.": "fc2."}
BLOCK = {"expand_conv": CONVOLUTION, "depthwise_conv": CONVOLUTION, "se": SQUEEZE, "linear_conv": CONVOLUTION}


def torchvision_names(layer_setting: Sequence[Sequence[Sequence[int]]]) -> dict[str, str]:
    """Return mmdet's key prefixes with torchvision's; empty for the EdgeTPU models, which torchvision lacks.

    Args:
        layer_setting: mmdet's, scaled for the arch: a row for each block of each layer, of kernel size, channels,
            squeeze ratio, stride, expansion and kind.
    """
    if any(row[-1] == EDGE_RESIDUAL for rows in layer_setting for row in rows):
        return {}
    names = with_prefixes("layers.0.", "features.0.", CONVOLUTION)
    stage = block = 0
    for layer, rows in enumerate(layer_setting[1:-1], start=1):
        width = None
        for index, (_, channels, _, _, expansion, _) in enumerate(rows):
            stage, block = (stage, block + 1) if channels == width else (stage + 1, 0)
            width = channels
            parts = [part for part in BLOCK if expansion > 1 or part != "expand_conv"]
            for place, part in enumerate(parts):
                names |= with_prefixes(
                    f"layers.{layer}.{index}.{part}.", f"features.{stage}.{block}.block.{place}.", BLOCK[part]
                )
    return names | with_prefixes(f"layers.{len(layer_setting) - 1}.", f"features.{stage + 1}.", CONVOLUTION)


def with_prefixes(ours: str, theirs: str, names: dict[str, str]) -> dict[str, str]:
    """Return a table of names with our prefix and theirs before them."""
    return {f"{ours}{left}": f"{theirs}{right}" for left, right in names.items()}


def torchvision_doubts(backbone: nn.Module) -> list[str]:
    """Return in words which arguments of a backbone do not suit torchvision's weights; shapes do not tell."""
    found = []
    if (backbone.conv_cfg or {}).get("type") == "Conv2dAdaptivePadding":
        found.append("pads differently: set conv_cfg.type=Conv2d")
    expected = 1e-3 if backbone.arch in ("b5", "b6", "b7") else 1e-5
    if backbone.norm_cfg.get("eps", 1e-5) != expected:
        found.append(f"has norms with another eps: set norm_cfg.eps={expected}")
    return [f"torchvision's weights, but the model {words}" for words in found]
