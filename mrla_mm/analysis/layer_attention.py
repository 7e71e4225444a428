"""How much each layer attends to each earlier one of its stage, recorded while a model runs (Fig. 1a of the paper).

Every variant's output is a weighted sum over the layers of the stage, o^t = sum_{s<=t} w^{t,s} v^s
+ rest:

    base, MLA   w^{t,s} = softmax_s(q^t . k^s / sqrt(D))                   each row sums to 1
    linear      w^{t,s} = phi(q^t) . phi(k^s) / sum_r phi(q^t) . phi(k^r)  each row sums to 1
    light       w^{t,t} = gate^t,  w^{t,s} = beta^t w^{t-1,s}              beta^t scales o^{t-1}
    inside o^t

With previous="output", beta is lambda and there is no rest. With previous="shortcut", o^{t-1}
reaches layer t through a norm: beta is lambda times that norm's scale on this image, and the rest
is what else the identity path carries. A branch whose norm is still at its initial zero passes
nothing on, so beta is 0.
"""

import warnings
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mrla_mm.attention import (
    MLA,
    LayerAttention,
    LayerAttentionResidual,
    LinearRLA,
    MRLABase,
    MRLALight,
    TokenAttentionResidual,
)
from mrla_mm.attention.tokens import to_map
from mrla_mm.errors import InputError
from mrla_mm.ops import feature_map, global_average, light_gate, softmax_scores

VARIANTS = (MRLALight, LinearRLA, MLA, MRLABase)


class StageScores(NamedTuple):
    """Scores of a stage of T layers, averaged over the images."""

    kind: str  # the variant's class
    layers: tuple[str, ...]  # names of the residual branches in the model, in order
    weights: Tensor  # (G, T, T); row t, column s is the weight that layer t gives layer s, NaN where s > t


class Layer(NamedTuple):
    """A layer of the stage that runs."""

    branch: LayerAttentionResidual
    pooled: Tensor  # (B, C), its input
    out: Tensor  # (B, C, H, W)
    weights: list[Tensor]  # one for each layer so far


class BranchRecorder(ExitStack):
    """Context manager that calls `on_forward` after each layer attention of a model.

    Attributes:
        branches: the residual branches that are recorded, by name; others are left out with a
            warning.
        stage_names: names of the branches of each stage, in the order in which they ran.

    Raises:
        InputError: the model has no branch to record.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        found = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, LayerAttentionResidual)
        }
        self.branches = {
            name: branch for name, branch in found.items() if self.supports(branch.attention)
        }
        unknown = {
            type(branch.attention).__name__
            for name, branch in found.items()
            if name not in self.branches
        }
        if unknown:
            kinds = ", ".join(sorted(unknown))
            warnings.warn(
                f"{type(self).__name__} cannot record {kinds}: these layers are left out",
                stacklevel=2,
            )
        if not self.branches:
            raise InputError(
                f"{type(model).__name__} has no layer attention that {type(self).__name__} can record"
            )
        self.stage_names: list[list[str]] = []

    def __enter__(self) -> "BranchRecorder":
        """Register the hooks."""
        for name, branch in self.branches.items():
            self.callback(branch.attention.register_forward_hook(partial(self._hook, name)).remove)
        return self

    @staticmethod
    def supports(attention: nn.Module) -> bool:
        """Whether a layer attention can be recorded."""
        raise NotImplementedError

    def on_forward(self, name: str, branch: LayerAttentionResidual, x: Tensor, out: Tensor) -> None:
        """Record a layer from the map x (B, C, H, W) that its attention took and the map it returned."""
        raise NotImplementedError

    def _hook(self, name, attention, args, result):
        if not any(name in stage for stage in self.stage_names):
            if attention.first_in_stage or not self.stage_names:
                self.stage_names.append([])
            self.stage_names[-1].append(name)
        with torch.no_grad():
            self.on_forward(name, self.branches[name], args[0], result[0])


class LayerAttentionRecorder(BranchRecorder):
    """Record the weights that each layer gives the layers of its stage.

    Attributes:
        last: a layer's weights for the last batch, by branch name: one tensor for each layer up to
            this one, broadcastable to (B, C, H, W).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.last: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._images: dict[str, int] = {}
        self._stage: list[Layer] = []
        self._history_tokens: Tensor | None = None

    def __enter__(self) -> "LayerAttentionRecorder":
        """Register the hooks, those on the norms of the history too."""
        for branch in self.branches.values():
            if getattr(branch, "history_norm", None) is not None:
                self.callback(
                    branch.history_norm.register_forward_pre_hook(self._keep_history).remove
                )
        return super().__enter__()

    def _keep_history(self, norm, args):
        self._history_tokens = args[0]

    @staticmethod
    def supports(attention: nn.Module) -> bool:
        """Whether the weights are known: a variant of ours, or a subclass that keeps its forward."""
        return any(
            isinstance(attention, cls) and type(attention).forward is cls.forward
            for cls in VARIANTS
        )

    def stages(self) -> list[StageScores]:
        """Return the mean scores of each stage over all images so far, in the order in which the stages ran."""
        found = []
        for names in self.stage_names:
            attention = self.branches[names[0]].attention
            weights = torch.full((attention.heads, len(names), len(names)), torch.nan)
            for index, name in enumerate(names):
                weights[:, index, : index + 1] = (self._sums[name] / self._images[name]).cpu()
            found.append(StageScores(type(attention).__name__, tuple(names), weights))
        return found

    def on_forward(self, name: str, branch: LayerAttentionResidual, x: Tensor, out: Tensor) -> None:
        """Add a layer's weights to the sums."""
        attention, pooled = branch.attention, global_average(x)
        earlier = [] if attention.first_in_stage else self._stage
        if isinstance(attention, MRLALight):
            weights = light_weights(
                attention, pooled, earlier, self._history_scale(branch, earlier, x)
            )
        else:
            weights = softmax_weights(attention, pooled, earlier)
        self._stage = [*earlier, Layer(branch, pooled, out, weights)]
        self.last[name] = weights
        per_head = [
            w.mean((2, 3)).unflatten(1, (attention.heads, -1)).mean(-1).expand(len(x), -1)
            for w in weights
        ]
        self._sums[name] = self._sums.get(name, 0) + torch.stack(per_head, -1).double().sum(
            0
        )  # (G, t)
        self._images[name] = self._images.get(name, 0) + len(x)

    def _history_scale(
        self, branch: LayerAttentionResidual, earlier: list[Layer], x: Tensor
    ) -> Tensor | float:
        """Return the factor of the last layer's output in the history of MRLA-light, before lambda."""
        if branch.attention.previous != "shortcut" or not earlier:
            return 0.0 if branch.attention.previous == "none" else 1.0
        if isinstance(branch, TokenAttentionResidual):
            return to_map(norm_scale(branch.history_norm, self._history_tokens), tuple(x.shape[2:]))
        return norm_scale(earlier[-1].branch.norm, earlier[-1].out)


def per_channel(score: Tensor, attention: LayerAttention) -> Tensor:
    """Repeat a score for the channels of its head: (B, G) -> (B, C, 1, 1)."""
    return score.repeat_interleave(attention.channels // attention.heads, 1)[:, :, None, None]


def softmax_weights(
    attention: LayerAttention, pooled: Tensor, earlier: list[Layer]
) -> list[Tensor]:
    """Weights of a layer whose scores over the stage sum to 1; only MLA applies its own f_K to earlier layers."""
    query = attention.project_query(pooled)  # (B, G, D)
    makers = [
        attention if isinstance(attention, MLA) else layer.branch.attention for layer in earlier
    ]
    keys = [maker.project_key(layer.pooled) for maker, layer in zip(makers, earlier, strict=True)]
    keys.append(attention.project_key(pooled))
    if isinstance(attention, LinearRLA):
        products = torch.stack(
            [(feature_map(query) * feature_map(key)).sum(-1) for key in keys], -1
        )
        scores = products / products.sum(-1, keepdim=True)  # (B, G, t)
    else:
        scores = softmax_scores(query, keys)  # (B, G, t)
    return [per_channel(score, attention) for score in scores.unbind(-1)]


def light_weights(
    attention: MRLALight, pooled: Tensor, earlier: list[Layer], history_scale: Tensor | float
) -> list[Tensor]:
    """Weights of MRLA-light: its own gate, and beta times the weights of the layer before."""
    gate = pooled.new_ones(len(pooled), attention.heads)
    if attention.gated:
        gate = light_gate(attention.project_query(pooled), attention.project_key(pooled))
    gate = per_channel(gate, attention)
    if not earlier:
        return [gate]
    beta = (
        history_scale
        if attention.history_scale is None
        else history_scale * attention.history_scale[:, None, None]
    )
    return [*(beta * weight for weight in earlier[-1].weights), gate]


def norm_scale(norm: nn.Module, x: Tensor) -> Tensor:
    """Return what a norm multiplies x by after it subtracts the mean, broadcastable to x.

    Raises:
        InputError: neither LayerNorm, GroupNorm nor a batch norm in eval mode.
    """
    if isinstance(norm, nn.LayerNorm):  # tokens (B, N, C)
        return torch.rsqrt(x.var(-1, keepdim=True, correction=0) + norm.eps) * norm.weight
    if isinstance(norm, nn.GroupNorm):
        variance = x.unflatten(1, (norm.num_groups, -1)).var((2, 3, 4), correction=0)  # (B, groups)
        variance = variance.repeat_interleave(norm.num_channels // norm.num_groups, 1)  # (B, C)
    elif isinstance(norm, nn.modules.batchnorm._BatchNorm) and not norm.training:
        variance = norm.running_var[None]  # (1, C)
    else:
        raise InputError(
            f"the scale of {type(norm).__name__} is not known; use group norm, or batch norm in eval mode"
        )
    return (torch.rsqrt(variance + norm.eps) * norm.weight)[:, :, None, None]
