"""The paper's layer attention, one elementary step after another, for a whole stage at once.

Written from the equations alone, naive on purpose, with no code of the package and no recurrent
state: every layer looks at the list of all layers, as the equations do. A block is a dict of its
parameters: `query`, `key`: (1, 1, k) taps or a (rows, C) matrix; `value`: (C, 1, 3, 3), absent
where v = x; `history_scale`: (C,), absent where lambda = 1. Feature maps are (B, C, H, W), one per
layer in a list; all functions but `each_image` see those of one image.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F


def each_image(stage):

    def run(xs, shortcuts, blocks, **options):
        images = zip(zip(*xs, strict=True), zip(*shortcuts, strict=True), strict=True)
        outputs = [stage(maps, histories, blocks, **options) for maps, histories in images]
        return [torch.stack(maps) for maps in zip(*outputs, strict=True)]

    return run


def project(image, weight):
    """f_Q or f_K: the averages times a matrix, or out_c = sum_j w_j y_(c + j - k // 2)."""
    y = image.sum((1, 2)) / (image.shape[1] * image.shape[2])
    if weight.dim() == 2:
        return torch.stack([(row * y).sum() for row in weight])
    taps = weight[0, 0]
    padded = F.pad(y, [len(taps) // 2] * 2)
    return sum(tap * padded[j : j + len(y)] for j, tap in enumerate(taps))


def value_of(image, block):
    """f_V: out_c(i, j) = sum_ab w_c(a, b) x_c(i + a - 1, j + b - 1), zeros outside."""
    if "value" not in block:
        return image
    height, width = image.shape[1:]
    padded = F.pad(image, [1] * 4)
    out = torch.zeros_like(image)
    for a in range(3):
        for b in range(3):
            tap = block["value"][:, 0, a, b, None, None]
            out = out + tap * padded[:, a : a + height, b : b + width]
    return out


def score(query, key):
    return (query * key).sum() / math.sqrt(len(query))


@each_image
def light(xs, shortcuts, blocks, *, head_channels, previous="shortcut", gated=True, gelu=None):
    """Algorithm 3, Eq. 9: o^t = sigmoid(q^t . k^t / sqrt(d_k)) v^t + lambda^t o^(t-1), by head."""
    outputs = []
    for t, (x, block) in enumerate(zip(xs, blocks, strict=True)):
        out = value_of(x, block) if gelu is None else gelu(value_of(x, block))
        if gated:
            count = len(x) // head_channels  # chunk(count): so many runs of consecutive channels
            query, key = (project(x, block[name]).chunk(count) for name in ("query", "key"))
            scores = [score(q, k) for q, k in zip(query, key, strict=True)]
            heads = zip(scores, out.chunk(count), strict=True)
            out = torch.cat([value / (1 + torch.exp(-s)) for s, value in heads])
        history = None
        if previous == "shortcut":
            history = shortcuts[t]
        elif previous == "output" and t > 0:
            history = outputs[t - 1]
        if history is not None:
            scale = block.get("history_scale", torch.ones(len(x)).to(x))
            out = out + scale[:, None, None] * history
        outputs.append(out)
    return outputs


@each_image
def kernel_attention(
    xs, shortcuts, blocks, *, head_channels, kernel, functions_of, gelu=lambda value: value
):
    """Layer t sums the v^s of layers s <= t with weights kernel(q^t, k^s) over their sum, by head.

    f_K and f_V are those of block functions_of(t, s).
    """
    outputs = []
    for t, x in enumerate(xs):
        count = len(x) // head_channels
        acting = [(xs[s], blocks[functions_of(t, s)]) for s in range(t + 1)]
        query = project(x, blocks[t]["query"]).chunk(count)
        keys = [project(y, block["key"]).chunk(count) for y, block in acting]
        values = [gelu(value_of(y, block)).chunk(count) for y, block in acting]
        heads = []
        for h in range(count):
            weights = [kernel(query[h], key[h]) for key in keys]
            weighted = [weights[s] * values[s][h] for s in range(t + 1)]
            heads.append(sum(weighted) / sum(weights))
        outputs.append(torch.cat(heads))
    return outputs


def phi(vector):
    """elu(z) + 1: z + 1 for positive z, exp(z) otherwise."""
    return torch.stack([z + 1 if z > 0 else torch.exp(z) for z in vector])


softmax = partial(kernel_attention, kernel=lambda q, k: torch.exp(score(q, k)))
# Algorithm 1, Eq. 6 with Eq. 5: layer s enters with its own f_K^s and f_V^s, whoever asks.
base = partial(softmax, functions_of=lambda t, s: s)
# Eq. 4 with Eq. 3: layer t applies its own f_K^t and f_V^t to every x^s.
mla = partial(softmax, functions_of=lambda t, s: t)
# Appendix A.3 before it is made recurrent.
linear_rla = partial(
    kernel_attention, kernel=lambda q, k: (phi(q) * phi(k)).sum(), functions_of=lambda t, s: s
)
