"""Key layouts: how the authors' release, torchvision and timm name what this package's backbones hold.

A backbone says by its attribute `key_layout` which layout its published files have. Renaming is one-to-one, so a file
of the release converts to ours and back to the same bytes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from mrla_mm.errors import InputError
from mrla_mm.weights.efficientnet import torchvision_names

ATTENTION = ".mrla."  # within a block's name, what belongs to its layer attention
LAMBDA = "mrla.attention.history_scale"
PROJECTIONS = {
    "mrla.attention.query.": "mrla.mrla.Wq.",
    "mrla.attention.key.": "mrla.mrla.Wk.",
    "mrla.attention.value.": "mrla.mrla.Wv.",
    LAMBDA: "mrla.lambda_t",
}


@dataclass(frozen=True)
class KeyLayout:
    """Names of a published family of files beside ours; without entries, the two are the same.

    Attributes:
        blocks: pattern of the part of our keys and theirs that names a block.
        parts: beginnings of our keys within a block, and theirs.
        others: beginnings of our keys outside blocks and of the names of blocks, and theirs.
        heads: beginnings of our classifiers' keys, the `head.` of the whole model included, and theirs.
        scale_shape: shape of a lambda in the release.
        entry: entry of a released file that holds the state dict.
        base_stages: the release's base models have `stages.0.` where ours, and its light ones, have `layer1.`.
        variants: types of layer attention that the release has; without any, only plain files have these names.
        trunk: first name of their keys that are all in `others`: one that is not is of a model of another size.
    """

    blocks: str = r"(?!)"
    parts: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)
    scale_shape: tuple[int, ...] = (-1,)
    entry: str = "state_dict"
    base_stages: bool = False
    variants: tuple[str, ...] = ("MRLALight", "MRLABase")
    trunk: str | None = None

    def to_ours(self, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Rename the tensors of any accepted layout to ours; return those of the backbone and those of the head."""
        backbone, head = {}, {}
        inverse = {theirs: ours for ours, theirs in self.heads.items()}
        for key, tensor in state.items():
            name = rename(key, inverse)
            if name != key:
                head[name] = tensor
                continue
            name = self.our_name(key)
            backbone[name] = tensor.flatten() if name.endswith(LAMBDA) else tensor
        return backbone, head

    def to_release(
        self, backbone: Mapping[str, Tensor], head: Mapping[str, Tensor], variant: str | None
    ) -> dict[str, Tensor]:
        """Rename our tensors to the authors' layout; of the head, what their classifiers have.

        Args:
            backbone: tensors by our key.
            head: tensors of the rest of the model, by their full key.
            variant: type of the layer attention; None for a plain backbone, whose layout is torchvision's or timm's.

        Raises:
            InputError: the release has no such variant.
        """
        if variant is not None and variant not in self.variants:
            known = " and ".join(self.variants) or "plain backbones of this kind"
            raise InputError(f"the authors' layout exists for {known}, not for {variant}")
        released = {}
        for key, tensor in backbone.items():
            name = self.rename_inside(key, self.parts, self.others)
            if key.endswith(LAMBDA):
                tensor = tensor.reshape(self.scale_shape)
            released[self.to_base(name) if variant == "MRLABase" else name] = tensor
        renamed = {key: rename(key, self.heads) for key in head}
        return released | {name: head[key] for key, name in renamed.items() if name != key}

    def our_name(self, key: str) -> str:
        """Return our name of a backbone's key in any accepted layout."""
        return self.rename_inside(self.from_base(key), inverted(self.parts), inverted(self.others))

    def rename_inside(self, key: str, parts: Mapping[str, str], others: Mapping[str, str]) -> str:
        """Rename what follows the block's name in a key, or the beginning of a key that is in no block."""
        block = re.match(self.blocks, key)
        return rename(block[0], others) + rename(key[block.end() :], parts) if block else rename(key, others)

    def from_base(self, key: str) -> str:
        """Return a key with our name of a stage for that of the release's base models."""
        if not self.base_stages:
            return key
        return re.sub(r"^stages\.(\d+)\.", lambda found: f"layer{int(found[1]) + 1}.", key)

    def to_base(self, key: str) -> str:
        """Return a key with the name that the release's base models have for a stage for ours."""
        if not self.base_stages:
            return key
        return re.sub(r"^layer(\d+)\.", lambda found: f"stages.{int(found[1]) - 1}.", key)


def rename(key: str, names: Mapping[str, str]) -> str:
    """Exchange the beginning of a key for the name it has in a table; a key that is not in it stays."""
    for old, new in names.items():
        if key.startswith(old):
            return new + key[len(old) :]
    return key


def inverted(names: Mapping[str, str]) -> dict[str, str]:
    """Return a one-to-one table read from right to left."""
    return {new: old for old, new in names.items()}


def efficientnet_layout(backbone: nn.Module) -> KeyLayout:
    """Return the layout of torchvision's EfficientNet of a backbone's size."""
    names = torchvision_names(backbone.layer_setting)
    return KeyLayout(others=names, heads={"head.fc.": "classifier.1."}, variants=(), trunk="features")


# A layout, or what makes that of a backbone where the names depend on its size.
LAYOUTS = {
    None: KeyLayout(),
    "resnet": KeyLayout(
        blocks=r"layer\d+\.\d+\.",
        parts={**PROJECTIONS, "mrla.norm.": "bn_mrla."},
        heads={"head.fc.": "fc."},
        scale_shape=(-1, 1, 1),
        base_stages=True,
    ),
    "deit": KeyLayout(
        blocks=r"(layers|blocks)\.\d+\.",
        parts={
            **PROJECTIONS,
            "mrla.norm.": "mrla.normx.",
            "mrla.history_norm.": "mrla.normo.",
            "ln1.": "norm1.",
            "ln2.": "norm2.",
            "ffn.layers.0.0.": "mlp.fc1.",
            "ffn.layers.1.": "mlp.fc2.",
        },
        others={"layers.": "blocks.", "patch_embed.projection.": "patch_embed.proj.", "ln1.": "norm."},
        heads={"head.layers.head.": "head.", "head.layers.head_dist.": "head_dist."},
        entry="model",
    ),
    "efficientnet": efficientnet_layout,
}
