"""The paper's layer attention, one elementary step after another, for a whole stage at once.

Written from the equations alone and on purpose naive: loops over images, heads, layers, kernel
taps; sums, products and exponentials spelled out. It shares no code with the package and keeps no
recurrent state: every layer looks at the list of all layers, as the equations do. Tensors serve as
float64 arrays whose gradient autograd can take.

A block is a dict of its parameters: `query`, `key`: (1, 1, k) taps or a (rows, C) matrix; `value`:
(C, 1, 3, 3), absent where v = x; `history_scale`: (C,), absent where lambda = 1. Feature maps are
(B, C, H, W), one per layer in a list.
"""

import math

import torch


def pooled(image):
    """Global average pooling of one (C, H, W) image: (C,)."""
    return image.sum((1, 2)) / (image.shape[1] * image.shape[2])


def conv1d(y, weight):
    """Slide k taps along the channels of y (C,): out_c = sum_j w_j y_(c + j - k // 2)."""
    taps = weight[0, 0]
    pad = len(taps) // 2
    border = torch.zeros(pad, dtype=y.dtype)
    padded = torch.cat([border, y, border])
    out = torch.zeros_like(y)
    for j in range(len(taps)):
        out = out + taps[j] * padded[j : j + len(y)]
    return out


def project(image, weight):
    """f_Q or f_K: pooling, then the 1D convolution or, for a matrix, one dot product per row."""
    y = pooled(image)
    if weight.dim() == 3:
        return conv1d(y, weight)
    return torch.stack([(row * y).sum() for row in weight])


def depthwise(image, weight):
    """out_c(i, j) = sum_ab w_c(a, b) x_c(i + a - 1, j + b - 1), zeros outside; (C, H, W)."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2, width + 2, dtype=image.dtype)
    padded[:, 1 : height + 1, 1 : width + 1] = image
    out = torch.zeros_like(image)
    for a in range(3):
        for b in range(3):
            tap = weight[:, 0, a, b].reshape(channels, 1, 1)
            out = out + tap * padded[:, a : a + height, b : b + width]
    return out


def values_of(image, block):
    """f_V."""
    return depthwise(image, block["value"]) if "value" in block else image


def heads(vector_or_map, count):
    """Split the leading dimension into `count` runs of consecutive channels."""
    size = len(vector_or_map) // count
    return [vector_or_map[h * size : (h + 1) * size] for h in range(count)]


def score(query, key):
    """q . k / sqrt(d_k) of one head."""
    return (query * key).sum() / math.sqrt(len(query))


def light(
    xs,
    shortcuts,
    blocks,
    *,
    head_channels,
    previous="shortcut",
    gated=True,
    activation=lambda value: value,
):
    """Algorithm 3, Eq. 9: o^t = sigmoid(q^t . k^t / sqrt(d_k)) v^t + lambda^t o^(t-1), by head."""
    outputs = []
    for t, (x, block) in enumerate(zip(xs, blocks, strict=True)):
        images = []
        for b in range(len(x)):
            attended = activation(values_of(x[b], block))
            if gated:
                count = x.shape[1] // head_channels
                query = heads(project(x[b], block["query"]), count)
                key = heads(project(x[b], block["key"]), count)
                value = heads(attended, count)
                gates = [1 / (1 + torch.exp(-score(query[h], key[h]))) for h in range(count)]
                attended = torch.cat([gates[h] * value[h] for h in range(count)])
            history = None
            if previous == "shortcut":
                history = shortcuts[t][b]
            elif previous == "output" and t > 0:
                history = outputs[t - 1][b]
            if history is not None:
                scale = block.get("history_scale", torch.ones(len(history), dtype=x.dtype))
                attended = attended + torch.stack(
                    [scale[c] * history[c] for c in range(len(history))]
                )
            images.append(attended)
        outputs.append(torch.stack(images))
    return outputs


def softmax_attention(query, keys, values, count):
    """Softmax over layers of q_h . k^s_h / sqrt(d_k), then the weighted sum of the v^s_h."""
    query = heads(query, count)
    keys = [heads(key, count) for key in keys]
    values = [heads(value, count) for value in values]
    out = []
    for h in range(count):
        weights = [torch.exp(score(query[h], key[h])) for key in keys]
        total = sum(weights)
        out.append(
            sum(weight / total * value[h] for weight, value in zip(weights, values, strict=True))
        )
    return torch.cat(out)


def softmax_stage(xs, blocks, head_channels, functions_of):
    """Attention of layer t over layers s <= t, f_K and f_V of block functions_of(t, s)."""
    outputs = []
    for t, x in enumerate(xs):
        acting = [blocks[functions_of(t, s)] for s in range(t + 1)]
        images = []
        for b in range(len(x)):
            query = project(x[b], blocks[t]["query"])
            keys = [project(xs[s][b], acting[s]["key"]) for s in range(t + 1)]
            values = [values_of(xs[s][b], acting[s]) for s in range(t + 1)]
            images.append(softmax_attention(query, keys, values, x.shape[1] // head_channels))
        outputs.append(torch.stack(images))
    return outputs


def base(xs, blocks, *, head_channels):
    """Algorithm 1, Eq. 6 with Eq. 5: layer s enters with its own f_K^s and f_V^s, whoever asks."""
    return softmax_stage(xs, blocks, head_channels, lambda t, s: s)


def mla(xs, blocks, *, head_channels):
    """Eq. 4 with Eq. 3: layer t applies its own f_K^t and f_V^t to every x^s."""
    return softmax_stage(xs, blocks, head_channels, lambda t, s: t)


def phi(vector):
    """elu(z) + 1: z + 1 for positive z, exp(z) otherwise."""
    return torch.stack([z + 1 if z > 0 else torch.exp(z) for z in vector])


def linear_rla(xs, blocks, *, head_channels):
    """Appendix A.3 before it is made recurrent, with k(x, y) = phi(x) . phi(y) per head."""
    outputs = []
    for t, x in enumerate(xs):
        count = x.shape[1] // head_channels
        images = []
        for b in range(len(x)):
            query = heads(phi(project(x[b], blocks[t]["query"])), count)
            out = []
            for h in range(count):
                numerator, denominator = 0, 0
                for s in range(t + 1):
                    key = heads(phi(project(xs[s][b], blocks[s]["key"])), count)[h]
                    kernel = (query[h] * key).sum()
                    numerator = numerator + kernel * heads(values_of(xs[s][b], blocks[s]), count)[h]
                    denominator = denominator + kernel
                out.append(numerator / denominator)
            images.append(torch.cat(out))
        outputs.append(torch.stack(images))
    return outputs
