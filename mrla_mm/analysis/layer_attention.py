"""How much each layer attends to each earlier one of its stage, recorded while a model runs (Fig. 1a of the paper).

Whatever the variant, a layer's output is a sum over the stage's layers, o^t = sum_{s<=t} w^{t,s} v^s + rest:

    base, MLA   w^{t,s} = softmax_s(q^t . k^s / sqrt(D))                   a head's rows sum to 1
    linear      w^{t,s} = phi(q^t) . phi(k^s) / sum_r phi(q^t) . phi(k^r)  they do too
    light       w^{t,t} = gate^t,  w^{t,s} = beta^t w^{t-1,s}              the product of betas times the gate of s

For light beta is how much of o^{t-1} the history term lets into o^t, by channel. With previous="output" it is lambda,
and there is no rest. With previous="shortcut" the history is the block's identity path, y^{t-1} = x^{t-1} + branch of
o^{t-1}: then beta is lambda times the scale of the norm that o^{t-1} passed on the way, with the statistics of this
image, and what the identity path carries besides o^{t-1} is the rest. A branch that is still an identity (its norm
starts at zero) hands nothing on, so beta is 0 there.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mrla_mm.analysis.listening import BranchListener, attended_map
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
from mrla_mm.ops import expand_heads, feature_map, global_average, light_gate, softmax_scores


class StageScores(NamedTuple):
    """Scores of a stage of T layers, averaged over the images.

    Attributes:
        kind: the variant's class.
        layers: names of the residual branches in the model, in the order of the layers.
        weights: (G, T, T); row t, column s is what layer t gives layer s, NaN where s > t.
    """

    kind: str
    layers: tuple[str, ...]
    weights: Tensor


class Layer(NamedTuple):
    """What a layer did, and all that its successor's weights need."""

    branch: LayerAttentionResidual
    weights: list[Tensor]
    keys: list[Tensor]
    output: Tensor
    out: Tensor | None


class LayerAttentionRecorder(BranchListener):
    """Record the weights that every layer of a model gives the values of its stage, as the model runs inside.

    Attributes:
        last: weights of each layer by the name of its branch, for the last batch: a list over the layers up to this
            one, each broadcastable to the values (B, C, H, W).

    Raises:
        InputError: the model has no layer attention, or one whose weights this does not know.

    Example:
        >>> import torch
        >>> from mrla_mm.analysis.layer_attention import LayerAttentionRecorder
        >>> from mrla_mm.backbones import MRLAResNet
        >>> backbone = MRLAResNet(50, layer_attention=dict(type="MRLABase")).eval()
        >>> with torch.no_grad(), LayerAttentionRecorder(backbone) as recorder:
        ...     _ = backbone(torch.rand(1, 3, 64, 64))
        >>> [tuple(stage.weights.shape) for stage in recorder.stages()]
        [(8, 3, 3), (16, 4, 4), (32, 6, 6), (64, 3, 3)]
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for branch in self.branches.values():
            if weigher(branch.attention) is None:
                raise InputError(f"the weights of {type(branch.attention).__name__} are not known; add them to weigher")
        self.last: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._images: dict[str, int] = {}
        self._previous: Layer | None = None

    def stages(self) -> list[StageScores]:
        """Return the mean scores of each stage over all images so far, in the order in which the stages ran."""
        return [self._stage(names) for names in self.stage_names]

    def _stage(self, names: list[str]) -> StageScores:
        attention = self.branches[names[0]].attention
        weights = torch.full((attention.heads, len(names), len(names)), torch.nan)
        for index, name in enumerate(names):
            weights[:, index, : index + 1] = (self._sums[name] / self._images[name]).cpu()
        return StageScores(type(attention).__name__, tuple(names), weights)

    def hear(self, name: str, branch: LayerAttentionResidual, given: dict, result: tuple) -> None:
        """Add a layer's weights to the sums."""
        attention = branch.attention
        self._previous = look(branch, given, result, None if attention.first_in_stage else self._previous)
        weights = self._previous.weights
        batch = self._previous.output.shape[0]
        per_head = torch.stack([head_means(weight, attention.heads).expand(batch, -1) for weight in weights], -1)
        self._sums[name] = self._sums.get(name, 0) + per_head.double().sum(0)
        self._images[name] = self._images.get(name, 0) + batch
        self.last[name] = weights

    def forget(self) -> None:
        """Drop the last layer."""
        self._previous = None


def look(branch: LayerAttentionResidual, given: dict, result: tuple, previous: Layer | None) -> Layer:
    """Work out a layer's weights from what its branch was given, what it returned and the layer before it."""
    output, memory = result
    shortcut = given["shortcut"]
    attention, seen = branch.attention, attended_map(branch, given)
    if isinstance(attention, MRLALight):
        share = None if previous is None else carried(branch, shortcut, previous, given.get("grid"))
        weights, keys = light_weights(attention, seen, share, previous), []
        needs_out = isinstance(branch.norm, nn.GroupNorm) and not isinstance(branch, TokenAttentionResidual)
        out = attention(seen, shortcut, given.get("memory"))[0] if needs_out else None
        return Layer(branch, weights, keys, output, out)
    scores, keys = weigher(attention)(attention, seen, memory, previous)  # (B, G, t)
    return Layer(branch, [expand_heads(score, seen) for score in scores.unbind(-1)], keys, output, None)


def weigher(attention: LayerAttention) -> Callable | None:
    """Return what computes a variant's weights, or None for a variant that is not known."""
    known = {MRLALight: light_weights, LinearRLA: linear_scores, MLA: mla_scores, MRLABase: base_scores}
    return next((function for cls, function in known.items() if isinstance(attention, cls)), None)


def base_scores(attention, x, memory, previous) -> tuple[Tensor, list[Tensor]]:
    """Scores (B, G, t) of MRLA-base from the keys in its memory."""
    return softmax_scores(attention.query_and_key(x)[0], memory.keys), []


def mla_scores(attention, x, memory, previous) -> tuple[Tensor, list[Tensor]]:
    """Scores (B, G, t) of MLA, whose layer makes the keys of all earlier ones anew."""
    keys = [attention.project_key(global_average(earlier)) for earlier in memory.maps]
    return softmax_scores(attention.query_and_key(x)[0], keys), []


def linear_scores(attention, x, memory, previous) -> tuple[Tensor, list[Tensor]]:
    """Scores (B, G, t) of linearised layer attention, whose memory has forgotten the single keys."""
    query, key = attention.query_and_key(x)
    keys = [*(previous.keys if previous else ()), key]
    scores = torch.stack([(feature_map(query) * feature_map(k)).sum(-1) for k in keys], -1)
    return scores / scores.sum(-1, keepdim=True), keys


def light_weights(attention: MRLALight, x: Tensor, share: Tensor | None, previous: Layer | None) -> list[Tensor]:
    """Weights of MRLA-light: its own gate, and beta times the weights of the layer before."""
    gate = light_gate(*attention.query_and_key(x)) if attention.gated else x.new_ones(len(x), attention.heads)
    gate = expand_heads(gate, x)  # (B, C, 1, 1)
    if previous is None:
        return [gate]
    if share is None:
        return [*(torch.zeros_like(weight) for weight in previous.weights), gate]
    beta = share if attention.history_scale is None else share * attention.history_scale[:, None, None]
    return [*(beta * weight for weight in previous.weights), gate]


def carried(
    branch: LayerAttentionResidual, shortcut: Tensor, previous: Layer, grid: tuple[int, int] | None
) -> Tensor | None:
    """Share of the last layer's o that is in the history, broadcastable to (B, C, H, W); None for no share."""
    attention = branch.attention
    if attention.previous == "output":
        return shortcut.new_ones(1, 1, 1, 1)
    same = shortcut is previous.output or (
        shortcut.shape == previous.output.shape and torch.equal(shortcut, previous.output)
    )
    if attention.previous == "none" or not same:
        return None
    if isinstance(branch, TokenAttentionResidual):
        return to_map(layer_norm_scale(branch.history_norm, shortcut)[:, branch.extra_tokens :], grid)
    return map_norm_scale(previous.branch.norm, previous.out)


def layer_norm_scale(norm: nn.LayerNorm, tokens: Tensor) -> Tensor:
    """Factor of each token's channels in a layer norm, with the token's statistics: (B, N, C) -> (B, N, C)."""
    if not isinstance(norm, nn.LayerNorm):
        raise InputError(f"the scale of {type(norm).__name__} over tokens is not known; LayerNorm is")
    scale = torch.rsqrt(tokens.var(-1, keepdim=True, correction=0) + norm.eps)
    return scale * norm.weight if norm.weight is not None else scale.expand_as(tokens)


def map_norm_scale(norm: nn.Module, x: Tensor | None) -> Tensor:
    """Factor of each channel in a norm of maps: (B, C, H, W) -> (B or 1, C, 1, 1), group norm with x's statistics."""
    if isinstance(norm, nn.modules.batchnorm._BatchNorm) and not norm.training and norm.running_var is not None:
        scale = torch.rsqrt(norm.running_var + norm.eps)[None]  # (1, C)
    elif isinstance(norm, nn.GroupNorm):
        groups = x.unflatten(1, (norm.num_groups, -1)).var((2, 3, 4), correction=0)  # (B, groups)
        scale = torch.rsqrt(groups + norm.eps).repeat_interleave(x.shape[1] // norm.num_groups, 1)  # (B, C)
    else:
        raise InputError(f"the scale of {type(norm).__name__} is not known here; evaluate batch norm or use group norm")
    return (scale if norm.weight is None else scale * norm.weight)[:, :, None, None]


def head_means(weight: Tensor, heads: int) -> Tensor:
    """Average a weight over the grid and the channels of each head: (B, C, h, w) -> (B, G)."""
    return weight.mean((2, 3)).unflatten(1, (heads, -1)).mean(-1)
