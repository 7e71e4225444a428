"""Key layouts: how the authors' release, torchvision, timm and PVTv2's authors name what our backbones hold.

A backbone's `key_layout` names the layout of its published files. Renaming is one-to-one and leaves
our own names alone, so a file of the release converts to ours and back to the same bytes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from mrla_mm.errors import InputError

EDGE_RESIDUAL = 1  # kind of a block in mmdet's layer_setting, the last entry of its row
CONVOLUTION = {
    "conv.": "0.",
    "bn.": "1.",
}  # of mmdet's EfficientNet and torchvision's, as the next two
SQUEEZE = {"conv1.conv.": "fc1.", "conv2.conv.": "fc2."}
BLOCK = {
    "expand_conv": CONVOLUTION,
    "depthwise_conv": CONVOLUTION,
    "se": SQUEEZE,
    "linear_conv": CONVOLUTION,
}
ATTENTION = ".mrla."  # in every key of layer attention
LAMBDA = "mrla.attention.history_scale"
PROJECTIONS = {
    "mrla.attention.query.": "mrla.mrla.Wq.",
    "mrla.attention.key.": "mrla.mrla.Wk.",
    "mrla.attention.value.": "mrla.mrla.Wv.",
    LAMBDA: "mrla.lambda_t",
}


@dataclass(frozen=True)
class KeyLayout:
    """How published files name our keys; without tables, just as we do. All tables map our prefix to theirs."""

    block: str = r"(?!)"  # pattern of a block's prefix, ours or theirs
    parts: Mapping[str, str] = field(default_factory=dict)  # within a block
    others: Mapping[str, str] = field(
        default_factory=dict
    )  # outside blocks, and the blocks' own prefixes
    heads: Mapping[str, str] = field(
        default_factory=dict
    )  # of the classifier, ours with the model's `head.`
    scale_shape: tuple[int, ...] = (-1,)  # of lambda in the release
    entry: str = "state_dict"  # of a released file, with its state dict
    base_stages: bool = (
        False  # whether the release's base models have `stages.0.` in place of `layer1.`
    )
    variants: tuple[str | None, ...] = (
        None,
        "MRLALight",
        "MRLABase",
    )  # published so; None is a plain backbone
    trunk: str | None = (
        None  # first name of all their keys; one left with it belongs to a model of another size
    )

    def to_ours(self, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of the backbone and those of the classifier, by our names."""
        state, heads = self.renamed(state), inverted(self.heads)
        head = {key: name for key in state if (name := rename(key, heads)) != key}
        backbone = {key: tensor for key, tensor in state.items() if key not in head}
        return backbone, {name: state[key] for key, name in head.items()}

    def renamed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of any accepted layout with our names for the backbone's tensors."""
        ours = {key: self.our_name(key) for key in state}
        return {
            name: state[key].flatten() if name.endswith(LAMBDA) else state[key]
            for key, name in ours.items()
        }

    def to_release(
        self, backbone: Mapping[str, Tensor], head: Mapping[str, Tensor], variant: str | None
    ) -> dict[str, Tensor]:
        """Return our tensors by the authors' names, for a type of layer attention; None is a plain backbone.

        Raises:
            InputError: the release has no such variant.
        """
        if variant not in self.variants:
            raise InputError(
                f"the authors' layout has no backbone of this kind with layer attention {variant}"
            )
        released = {}
        for key, tensor in backbone.items():
            name = self.rename_block(key, self.parts, self.others)
            if variant == "MRLABase" and self.base_stages:
                name = re.sub(r"^layer(\d+)\.", lambda found: f"stages.{int(found[1]) - 1}.", name)
            released[name] = tensor.reshape(self.scale_shape) if key.endswith(LAMBDA) else tensor
        renamed = {key: rename(key, self.heads) for key in head}
        return released | {name: head[key] for key, name in renamed.items() if name != key}

    def our_name(self, key: str) -> str:
        """Return our name of a backbone's key in any accepted layout."""
        if self.base_stages:
            key = re.sub(r"^stages\.(\d+)\.", lambda found: f"layer{int(found[1]) + 1}.", key)
        return self.rename_block(key, inverted(self.parts), inverted(self.others))

    def rename_block(self, key: str, parts: Mapping[str, str], others: Mapping[str, str]) -> str:
        """Rename a block's prefix and the part behind it, or the prefix of a key that is in no block."""
        block = re.match(self.block, key)
        return (
            rename(block[0], others) + rename(key[block.end() :], parts)
            if block
            else rename(key, others)
        )


class PVTv2Layout(KeyLayout):
    """The layout of PVTv2's authors, whose queries, keys and values mmdet joins; so there is no way back."""

    def renamed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict with mmdet's names, converted by mmdet if it is the authors'."""
        from mmdet.models.backbones.pvt import (
            pvt_convert,
        )  # not at the top: mmdet takes seconds to import

        if "patch_embed1.proj.weight" not in state:
            return dict(state)
        return pvt_convert(state) | {
            key: tensor for key, tensor in state.items() if key.startswith("head.")
        }


def rename(key: str, names: Mapping[str, str]) -> str:
    """Replace the prefix of a key by its name in a table."""
    return next((new + key[len(old) :] for old, new in names.items() if key.startswith(old)), key)


def inverted(names: Mapping[str, str]) -> dict[str, str]:
    """Return a one-to-one table from right to left."""
    return {new: old for old, new in names.items()}


def layout_of(module: nn.Module) -> KeyLayout:
    """Return the key layout of a backbone's published files; EfficientNet's depends on the size."""
    name = getattr(module, "key_layout", None)
    if name == "efficientnet":
        others = torchvision_names(module.layer_setting)
        return KeyLayout(
            others=others, heads={"head.fc.": "classifier.1."}, variants=(None,), trunk="features"
        )
    return LAYOUTS[name]


def torchvision_names(layer_setting: Sequence[Sequence[Sequence[int]]]) -> dict[str, str]:
    """Return mmdet's key prefixes with torchvision's; empty for the EdgeTPU models, which torchvision lacks.

    torchvision has a stage of `features` for each width, mmdet a layer for each resolution. Where
    the width changes at the same resolution, a layer holds two stages, so the names of its later
    blocks depend on how deep the first is. A row of mmdet's `layer_setting` is a block's kernel
    size, channels, squeeze ratio, stride, expansion and kind.
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
                    f"layers.{layer}.{index}.{part}.",
                    f"features.{stage}.{block}.block.{place}.",
                    BLOCK[part],
                )
    return names | with_prefixes(
        f"layers.{len(layer_setting) - 1}.", f"features.{stage + 1}.", CONVOLUTION
    )


def with_prefixes(ours: str, theirs: str, names: dict[str, str]) -> dict[str, str]:
    """Return a table of names with our prefix and theirs before them."""
    return {f"{ours}{left}": f"{theirs}{right}" for left, right in names.items()}


LAYOUTS = {
    None: KeyLayout(),
    "resnet": KeyLayout(
        block=r"layer\d+\.\d+\.",
        parts={**PROJECTIONS, "mrla.norm.": "bn_mrla."},
        heads={"head.fc.": "fc."},
        scale_shape=(-1, 1, 1),
        base_stages=True,
    ),
    "deit": KeyLayout(
        block=r"(layers|blocks)\.\d+\.",
        parts={
            **PROJECTIONS,
            "mrla.norm.": "mrla.normx.",
            "mrla.history_norm.": "mrla.normo.",
            "ln1.": "norm1.",
            "ln2.": "norm2.",
            "ffn.layers.0.0.": "mlp.fc1.",
            "ffn.layers.1.": "mlp.fc2.",
        },
        others={
            "layers.": "blocks.",
            "patch_embed.projection.": "patch_embed.proj.",
            "ln1.": "norm.",
        },
        heads={"head.layers.head.": "head.", "head.layers.head_dist.": "head_dist."},
        entry="model",
    ),
    "pvtv2": PVTv2Layout(heads={"head.fc.": "head."}, variants=()),
}
