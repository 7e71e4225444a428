"""Strict pretrained weights for this package's backbones, in every published key layout."""

from mmengine.model import BaseModule
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from mrla_mm.weights.layouts import WeightDeclarations
from mrla_mm.weights.loading import load_weights

PRETRAINED = ("Pretrained", "PretrainedInit")  # mmengine's initializer and its class
NOT_OURS = ("type", "map_location")  # keys of its `init_cfg` that mean nothing to us


class PretrainedBackbone(WeightDeclarations):
    """Mixin of the backbones, first in their bases, for modules of mmengine (`BaseModule`).

    ``init_cfg=dict(type="Pretrained", checkpoint=...)`` loads strictly and prints what was loaded;
    mmengine's own initializer, which it leaves alone, loads whatever matches, be it nothing.
    Besides mmengine's `prefix` it takes

    * ``strict=False``: load what matches and report the rest;
    * ``entry="model_ema"``: take this entry of the file.

    State dicts in the layout of published files (torchvision's, timm's, the authors') are renamed
    as they are loaded, whoever loads them: `init_cfg`, `load_from`, mmengine's ``load_checkpoint``
    or torch's ``load_state_dict``.
    """

    freezes_from = 0  # the least `frozen_stages` for which `_freeze_stages` may be called

    def init_random(self) -> None:
        """Initialise as the host does where no file is named; subclasses add to it."""
        super().init_weights()

    def init_weights(self) -> None:
        """Initialise as mmengine does, then `load_weights` from the files of `init_cfg`, once."""
        if self.is_init:
            return
        files = pretrained_entries(self)
        if files:
            self.init_others(files)
        else:
            self.init_random()
        for module in self.modules():
            if hasattr(module, "reset_zero_init"):  # a start that hosts overwrite
                module.reset_zero_init()
        for entry in files:
            options = {key: value for key, value in entry.items() if key not in NOT_OURS}
            load_weights(self, options.pop("checkpoint"), **options).log()
        for module in self.modules():
            if isinstance(module, BaseModule):
                module.is_init = True

    def init_others(self, files: list[dict]) -> None:
        """Initialise as the other entries of `init_cfg` say."""
        init_cfg = self.init_cfg
        others = [] if isinstance(init_cfg, dict) else init_cfg
        self.init_cfg = [entry for entry in others if entry not in files]
        # mmdet's PVT and mmpretrain's ViT have an `init_weights` of their own, for one file alone
        BaseModule.init_weights(self)
        self.init_cfg = init_cfg
        self.is_init = False  # until the files are loaded

    def train(self, mode: bool = True) -> "PretrainedBackbone":
        """Switch mode, except for what is frozen and, with `norm_eval`, for all batch norms.

        mmdet's EfficientNet leaves SyncBN out, and some of mmdet's modules do not return self.
        """
        super().train(mode)
        freezes = getattr(self, "frozen_stages", -1) >= self.freezes_from
        if freezes and hasattr(self, "_freeze_stages"):
            self._freeze_stages()
        if getattr(self, "norm_eval", False):
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args) -> None:
        """Rename what is of a published layout, then load as torch does."""
        self.rename_published(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def pretrained_entries(module: object) -> list[dict]:
    """Return the entries of a module's `init_cfg` that name a weight file."""
    init_cfg = getattr(module, "init_cfg", None) or []
    entries = [init_cfg] if isinstance(init_cfg, dict) else init_cfg
    names = [getattr(entry["type"], "__name__", entry["type"]) for entry in entries]
    kinds = [str(name).rpartition(".")[2] for name in names]  # without a scope
    return [entry for entry, kind in zip(entries, kinds, strict=True) if kind in PRETRAINED]
