"""How much each layer attends to each earlier one of its stage (Fig. 1a of the paper).

Every variant's output is a weighted sum over the layers of the stage, o^t = sum_{s<=t} w^{t,s} v^s
+ rest:

    base, MLA   w^{t,s} = softmax_s(q^t . k^s / sqrt(D))                   each row sums to 1
    linear      w^{t,s} = phi(q^t) . phi(k^s) / sum_r phi(q^t) . phi(k^r)  each row sums to 1
    light       w^{t,t} = gate^t,  w^{t,s} = beta^t w^{t-1,s}

where beta^t scales o^{t-1} inside o^t. With previous="output", beta is lambda and there is no rest.
With previous="shortcut", o^{t-1} reaches layer t through a norm: beta is lambda times that norm's
scale on this image, and the rest is what else the identity path carries. A branch whose norm is
still at its initial zero passes nothing on, so beta is 0.
"""

from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mrla_mm.attention import (
    MLA,
    AttentionResidual,
    LinearRLA,
    MRLABase,
    MRLALight,
    TokenAttentionResidual,
)
from mrla_mm.attention.tokens import to_map
from mrla_mm.errors import InputError
from mrla_mm.functional import (
    expand_heads,
    feature_map,
    global_average,
    light_gate,
    on_map,
    softmax_scores,
)

VARIANTS = (MRLALight, LinearRLA, MLA, MRLABase)


class StageScores(NamedTuple):
    """Scores of a stage of T layers, averaged over the images."""

    kind: str  # the variant's class
    layers: tuple[str, ...]  # names of the residual branches in the model, in order
    weights: Tensor  # (G, T, T), what layer t (row) gives layer s (column); NaN where s > t


class Layer(NamedTuple):
    """A layer of the stage that runs."""

    branch: AttentionResidual
    pooled: Tensor  # (B, C), its input
    out: Tensor  # (B, C, H, W)
    weights: list[Tensor]  # one for each layer so far


class BranchRecorder(ExitStack):
    """Context manager that records what `on_forward` returns for each layer attention of a model.

    A subclass has `supports(attention)`, whether it can record a layer attention, and
    `on_forward(name, x, out)`, what to record of one that took the map x (B, C, H, W). A model
    without layer attention, or with one that cannot be recorded, raises InputError.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        modules = model.named_modules()
        self.branches = {name: m for name, m in modules if isinstance(m, AttentionResidual)}
        if not self.branches:
            raise InputError(f"{type(model).__name__} has no layer attention to record")
        for name, branch in self.branches.items():
            if not self.supports(branch.attention):
                kind = type(branch.attention).__name__
                raise InputError(f"{type(self).__name__} cannot record {kind} at {name}")
        self.stage_names: list[list[str]] = []  # branches of each stage, in the order they ran in
        self.values: dict[str, list[Tensor]] = defaultdict(list)  # of a branch, (B, ...) a batch

    def __enter__(self) -> "BranchRecorder":
        for name, branch in self.branches.items():
            self.callback(branch.attention.register_forward_hook(partial(self._hook, name)).remove)
        return self

    def _hook(self, name, attention, args, result):
        if name not in self.values:
            if attention.first_in_stage or not self.stage_names:
                self.stage_names.append([])
            self.stage_names[-1].append(name)
        with torch.no_grad():
            recorded = self.on_forward(name, args[0], result[0])
        self.values[name].append(recorded.cpu())


class LayerAttentionRecorder(BranchRecorder):
    """Record the weights that each layer gives the layers of its stage."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        # By branch, for the last batch: a weight, broadcastable to (B, C, H, W), for each layer.
        self.last: dict[str, list[Tensor]] = {}
        self._stage: list[Layer] = []
        self._history_tokens: Tensor | None = None

    def __enter__(self) -> "LayerAttentionRecorder":
        for branch in self.branches.values():
            norm = getattr(branch, "history_norm", None)
            if norm is not None:
                self.callback(norm.register_forward_pre_hook(self._keep_history).remove)
        return super().__enter__()

    def _keep_history(self, norm, args):
        self._history_tokens = args[0]

    @staticmethod
    def supports(attention: nn.Module) -> bool:
        """Whether the weights are known: a variant of ours that keeps its forward."""
        return type(attention).forward in [cls.forward for cls in VARIANTS]

    def stages(self) -> list[StageScores]:
        """Return the mean scores over all images, by stage in the order in which they ran."""
        found = []
        for names in self.stage_names:
            attention = self.branches[names[0]].attention
            weights = torch.full((attention.heads, len(names), len(names)), torch.nan)
            for index, name in enumerate(names):
                weights[:, index, : index + 1] = torch.cat(self.values[name]).mean(0)
            found.append(StageScores(type(attention).__name__, tuple(names), weights))
        return found

    def on_forward(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """Return a layer's mean weights for each image and head, (B, G, layers so far)."""
        branch = self.branches[name]
        attention = branch.attention
        pooled = global_average(x)
        earlier = [] if attention.first_in_stage else self._stage
        if isinstance(attention, MRLALight):
            history_scale = self._history_scale(branch, earlier, x)
            weights = light_weights(attention, pooled, earlier, history_scale)
        else:
            weights = softmax_weights(attention, pooled, earlier)
        self._stage = [*earlier, Layer(branch, pooled, out, weights)]
        self.last[name] = weights
        per_channel = torch.stack([w.mean((2, 3)).expand(len(x), -1) for w in weights], -1)
        return per_channel.unflatten(1, (attention.heads, -1)).mean(2).double()

    def _history_scale(self, branch, earlier, x):
        """Return the factor of the last layer's output in MRLA-light's history, before lambda."""
        if branch.attention.previous != "shortcut" or not earlier:
            return 0.0 if branch.attention.previous == "none" else 1.0
        if isinstance(branch, TokenAttentionResidual):
            return to_map(norm_scale(branch.history_norm, self._history_tokens), tuple(x.shape[2:]))
        return norm_scale(earlier[-1].branch.norm, earlier[-1].out)


def softmax_weights(attention: nn.Module, pooled: Tensor, earlier: list[Layer]) -> list[Tensor]:
    """Weights of a layer whose scores over the stage sum to 1."""
    query = attention.project_query(pooled)  # (B, G, D)
    keys = []
    for layer in earlier:  # only MLA applies its own f_K to earlier layers
        maker = attention if isinstance(attention, MLA) else layer.branch.attention
        keys.append(maker.project_key(layer.pooled))
    keys.append(attention.project_key(pooled))
    if isinstance(attention, LinearRLA):
        features = feature_map(query)
        products = torch.stack([(features * feature_map(key)).sum(-1) for key in keys], 1)
        scores = products / products.sum(1, keepdim=True)  # (B, t, G)
    else:
        scores = softmax_scores(query, torch.stack(keys, 1))  # (B, t, G)
    channels = pooled.shape[1]
    return [on_map(expand_heads(score, channels), pooled) for score in scores.unbind(1)]


def light_weights(
    attention: MRLALight, pooled: Tensor, earlier: list[Layer], history_scale: Tensor | float
) -> list[Tensor]:
    """Weights of MRLA-light: its own gate, and beta times the weights of the layer before."""
    gate = pooled.new_ones(len(pooled), attention.heads)
    if attention.gated:
        gate = light_gate(attention.project_query(pooled), attention.project_key(pooled))
    gate = on_map(expand_heads(gate, pooled.shape[1]), pooled)  # (B, C, 1, 1)
    if not earlier:
        return [gate]
    beta = history_scale
    if attention.history_scale is not None:
        beta = history_scale * attention.history_scale[:, None, None]
    return [*(beta * weight for weight in earlier[-1].weights), gate]


def norm_scale(norm: nn.Module, x: Tensor) -> Tensor:
    """Return what a norm multiplies x by after it subtracts the mean, broadcastable to x."""
    if isinstance(norm, nn.LayerNorm):  # tokens (B, N, C)
        return torch.rsqrt(x.var(-1, keepdim=True, correction=0) + norm.eps) * norm.weight
    if not isinstance(norm, nn.modules.batchnorm._BatchNorm) or norm.training:
        known = "layer norm, or batch norm in eval mode"
        raise InputError(f"the scale of {type(norm).__name__} is not known; use {known}")
    return (torch.rsqrt(norm.running_var + norm.eps) * norm.weight)[None, :, None, None]
