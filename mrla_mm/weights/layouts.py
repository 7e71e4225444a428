"""Key layouts: how the authors of MRLA and PVTv2, torchvision and timm name our tensors.

A backbone's `key_layout` names the layout of its published files. Renaming goes from their names to
ours and leaves our own names alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from mmdet.models.backbones.pvt import pvt_convert
from mmdet.models.backbones.swin import swin_converter
from torch import Tensor

from mrla_mm.weights.states import rename_keys, strip_prefix

ATTENTION = ".mrla."  # in every key of layer attention
LAMBDA = ".mrla.attention.history_scale"
PROJECTIONS = {
    ".mrla.mrla.Wq.": ".mrla.attention.query.",
    ".mrla.mrla.Wk.": ".mrla.attention.key.",
    ".mrla.mrla.Wv.": ".mrla.attention.value.",
    ".mrla.lambda_t": LAMBDA,
}


@dataclass(frozen=True)
class KeyLayout:
    """How published files name our keys; all tables map their names to ours."""

    prefixes: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)  # anywhere in a key
    classifier: Mapping[str, str] = field(default_factory=dict)  # prefixes of its head
    dropped: tuple[str, ...] = ()  # endings of keys that the model computes anew

    def split(self, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of the backbone and those of the classifier's head, by our names."""
        renamed = self.renamed(state)
        named = rename_keys(renamed, partial(rename_prefix, names=self.classifier))
        backbone = {key: tensor for key, tensor in named.items() if key in renamed}
        head = {key: tensor for key, tensor in named.items() if key not in renamed}
        return backbone, head

    def renamed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict with our names for the backbone's tensors."""
        state = {key: tensor for key, tensor in state.items() if not key.endswith(self.dropped)}
        renamed = rename_keys(state, self.our_name)
        lambdas = {key: value.flatten() for key, value in renamed.items() if key.endswith(LAMBDA)}
        return renamed | lambdas

    def our_name(self, key: str) -> str:
        """Return our name of a key."""
        name = rename_prefix(key, self.prefixes)
        for theirs, ours in self.parts.items():
            name = name.replace(theirs, ours)
        return name


@dataclass(frozen=True)
class ConvertedLayout(KeyLayout):
    """The layout of authors whose tensors mmdet joins or orders anew, as its own backbones do."""

    classifier: Mapping[str, str] = field(default_factory=lambda: {"head.": "head.fc."})
    first: str = ""  # a key that their files alone have
    convert: Callable[[dict], Mapping] = dict  # a state dict of theirs to mmdet's names

    def renamed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict with mmdet's names, converted by mmdet if it is the authors'."""
        if self.first not in state:
            return super().renamed(state)
        converted = self.convert({k: v for k, v in state.items() if not k.endswith(self.dropped)})
        head = {key: tensor for key, tensor in state.items() if key.startswith("head.")}
        converted = {key.removeprefix("backbone."): value for key, value in converted.items()}
        return super().renamed(converted | head)


def rename_prefix(key: str, names: Mapping[str, str]) -> str:
    """Replace the prefix of a key by its name in a table."""
    return next((new + key[len(old) :] for old, new in names.items() if key.startswith(old)), key)


LAYOUTS = {
    None: KeyLayout(),
    "resnet": KeyLayout(
        # the release's base models number their stages, its light models do as torchvision's
        prefixes={f"stages.{index}.": f"layer{index + 1}." for index in range(4)},
        parts={**PROJECTIONS, ".bn_mrla.": ".mrla.norm."},
        classifier={"fc.": "head.fc."},
    ),
    "deit": KeyLayout(
        prefixes={"blocks.": "layers.", "norm.": "ln1."},
        parts={
            **PROJECTIONS,
            "patch_embed.proj.": "patch_embed.projection.",
            ".mrla.normx.": ".mrla.norm.",
            ".mrla.normo.": ".mrla.history_norm.",
            ".norm1.": ".ln1.",
            ".norm2.": ".ln2.",
            ".mlp.fc1.": ".ffn.layers.0.0.",
            ".mlp.fc2.": ".ffn.layers.1.",
        },
        classifier={"head.": "head.layers.head.", "head_dist.": "head.layers.head_dist."},
    ),
    "pvtv2": ConvertedLayout(first="patch_embed1.proj.weight", convert=pvt_convert),
    "swin": ConvertedLayout(
        first="patch_embed.proj.weight", convert=swin_converter, dropped=(".attn_mask",)
    ),
    # older files of mmpretrain, which renames their keys for objects of its very class alone
    "mmpretrain_swin": KeyLayout(prefixes={"norm.": "norm3."}, dropped=(".attn_mask",)),
}


class WeightDeclarations:
    """What a backbone may declare about its weight files; the defaults are any other model's."""

    key_layout: str | None = None  # name in `LAYOUTS`; None if files use this model's names
    optional_parts: tuple[str, ...] = ()  # prefixes of keys that a file may lack
    unbuilt_parts: tuple[str, ...] = ()  # prefixes of a file's keys for layers that are left out

    def published_layout(self) -> KeyLayout:
        """Return the layout of published files, here that of `key_layout`."""
        return LAYOUTS[self.key_layout]

    def rename_published(self, state: dict[str, Tensor], prefix: str) -> None:
        """Give what published files hold below a prefix of a state dict our names, in place."""
        published = strip_prefix(state, prefix)
        for key in published:
            del state[f"{prefix}{key}"]
        for key, tensor in self.published_layout().renamed(published).items():
            state[f"{prefix}{key}"] = tensor


def declarations_of(module: object) -> WeightDeclarations:
    """Return what a module declares, the defaults for a whole model or another's backbone."""
    return module if isinstance(module, WeightDeclarations) else WeightDeclarations()
