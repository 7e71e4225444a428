"""Loops over contiguous maps, seen as (planes, H * W); a unit of work is a plane (b, c).

Maps are given by their addresses, 0 for one that is absent. A coefficient is one value for each
plane.
"""

import numpy as np
from numba import float32, uintp

from mrla_mm.ops.loops import compiled, map_at

BLOCK = 1024  # pixels that stay in a core's first cache from one loop to the next
GROUP = 16 * BLOCK  # pixels of a gradient that stay in its second cache, value after value


@compiled
def add_relu(start, stop, grid, shape, c, shortcut, x, sums):
    """Write x = relu(c + shortcut), NaN included, and its sum over each plane."""
    c, shortcut, x = map_at(c, shape), map_at(shortcut, shape), map_at(x, shape)
    pixels = shape[1]
    for plane in range(start, stop):
        total = 0.0
        for first in range(0, pixels, BLOCK):
            end = min(first + BLOCK, pixels)
            a, b = c[plane, first:end], shortcut[plane, first:end]
            y = x[plane, first:end]
            of_block = float32(0)
            for p in range(len(y)):
                value = a[p] + b[p]
                value = float32(0) if value < 0 else value
                y[p] = value
                of_block += value
            total += of_block
        sums[plane, 0] = total


@compiled
def rows_at_a_time(height, width):
    """How many pixels of whole rows are computed at a time, and a buffer for `pad_rows`.

    Also returned is whether each of these pixels has a left, and whether it has a right neighbour.
    """
    block = min(height, max(BLOCK // width, 1)) * width
    column = np.arange(block) % width
    return block, np.zeros(block + 2 * width + 2, np.float32), column > 0, column < width - 1


@compiled
def pad_rows(x, first, end, width, padded):
    """Copy pixels of a plane, whole rows and one more above and below; 0 beyond the plane.

    A pixel more comes before and after them, so that all have nine neighbours in memory. The left
    one of a row's first pixel is the last of the row above, which has_left tells to leave out.
    """
    above = max(first - width, 0)
    rows = x[above : min(end + width, len(x))]
    margin = 1 + above - (first - width)
    padded[:margin] = 0
    inner = padded[margin:]
    for p in range(len(rows)):
        inner[p] = rows[p]
    inner[len(rows) :] = 0


@compiled
def convolve(
    start, stop, grid, shape, x, history, relu_output, out, grad_history, weight, offset, slope
):
    """Write out = dw(x; weight) + offset + slope history, but 0 where relu_output is 0 or less.

    If asked for, write grad_history = slope x too, plus out where there is a `relu_output`.
    """
    has_relu, has_grad_history = relu_output != 0, grad_history != 0
    # The compiler makes a loop for each combination of these, but with a ReLU alone a scalar one.
    given = history != 0, has_relu, has_grad_history or has_relu
    x, history, relu_output = map_at(x, shape), map_at(history, shape), map_at(relu_output, shape)
    out, grad_history = map_at(out, shape), map_at(grad_history, shape)
    height, width, _ = grid
    block, padded, has_left, has_right = rows_at_a_time(height, width)
    unused = np.empty(block, np.float32)
    for plane in range(start, stop):
        for first in range(0, shape[1], block):
            end = min(first + block, shape[1])
            y = out[plane, first:end]
            h = history[plane, first:end]
            relu_y = relu_output[plane, first:end]
            grad_h = grad_history[plane, first:end] if has_grad_history else unused
            if weight.shape[1] == 1:
                scale_pixels(
                    x[plane, first:end], weight[plane, 0], offset[plane],
                    given, h, slope[plane], relu_y, y, grad_h,
                )  # fmt: skip
            else:
                pad_rows(x[plane], first, end, width, padded)
                convolve_rows(
                    padded, width, has_left, has_right, weight[plane], offset[plane],
                    given, h, slope[plane], relu_y, y, grad_h,
                )  # fmt: skip


@compiled
def scale_pixels(x, weight, offset, given, history, slope, relu_output, out, grad_history):
    """Write what `convolve` does of some pixels, for a kernel of one tap."""
    has_history, has_relu, has_grad_history = given
    for p in range(len(out)):
        value = offset + weight * x[p]
        if has_history:
            value += slope * history[p]
        if has_relu:
            value = float32(0) if relu_output[p] <= 0 else value
        out[p] = value
        if has_grad_history:
            scaled = slope * x[p]
            grad_history[p] = scaled + value if has_relu else scaled


@compiled
def convolve_rows(
    padded, width, has_left, has_right, weight, offset, given, history, slope, relu_output, out,
    grad_history,
):  # fmt: skip
    """Write what `convolve` does of the rows that `pad_rows` copied."""
    has_history, has_relu, has_grad_history = given
    w0, w1, w2 = weight[0], weight[1], weight[2]
    w3, w4, w5 = weight[3], weight[4], weight[5]
    w6, w7, w8 = weight[6], weight[7], weight[8]
    one, two = uintp(1), uintp(2)
    row1, row2 = uintp(width), uintp(2 * width)
    for p in range(uintp(len(out))):
        left = w0 * padded[p] + w3 * padded[p + row1] + w6 * padded[p + row2]
        at = w1 * padded[p + one] + w4 * padded[p + row1 + one] + w7 * padded[p + row2 + one]
        right = w2 * padded[p + two] + w5 * padded[p + row1 + two] + w8 * padded[p + row2 + two]
        # What is not there is left out, not multiplied by 0: it may be infinite.
        left = left if has_left[p] else float32(0)
        right = right if has_right[p] else float32(0)
        value = offset + left + at + right
        if has_history:
            value += slope * history[p]
        if has_relu:
            value = float32(0) if relu_output[p] <= 0 else value
        out[p] = value
        if has_grad_history:
            scaled = slope * padded[p + row1 + one]
            grad_history[p] = scaled + value if has_relu else scaled


@compiled
def add_scaled(out, x, factor):
    """Add factor x to out."""
    for p in range(len(out)):
        out[p] += factor * x[p]


@compiled
def grid_sums(start, stop, grid, shape, grad, x, history, sums):
    """Write sums over each plane of grad times x at the kernel's 9 taps, history, and 1."""
    has_history = history != 0
    grad, x, history = map_at(grad, shape), map_at(x, shape), map_at(history, shape)
    height, width, _ = grid
    block, padded, has_left, has_right = rows_at_a_time(height, width)
    for plane in range(start, stop):
        for first in range(0, shape[1], block):
            end = min(first + block, shape[1])
            pad_rows(x[plane], first, end, width, padded)
            g, h = grad[plane, first:end], history[plane, first:end]
            add_sums(g, width, padded, has_left, has_right, has_history, h, sums[plane])


@compiled
def add_sums(grad, width, padded, has_left, has_right, has_history, history, totals):
    """Add the sums of a gradient times what is under each tap of the kernel, history, and 1."""
    zero = s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = s8 = of_history = of_grad = float32(0)
    one, two = uintp(1), uintp(2)
    row1, row2 = uintp(width), uintp(2 * width)
    for p in range(uintp(len(grad))):
        g = grad[p]
        s0 += g * padded[p] if has_left[p] else zero
        s1 += g * padded[p + one]
        s2 += g * padded[p + two] if has_right[p] else zero
        s3 += g * padded[p + row1] if has_left[p] else zero
        s4 += g * padded[p + row1 + one]
        s5 += g * padded[p + row1 + two] if has_right[p] else zero
        s6 += g * padded[p + row2] if has_left[p] else zero
        s7 += g * padded[p + row2 + one]
        s8 += g * padded[p + row2 + two] if has_right[p] else zero
        of_grad += g
        if has_history:
            of_history += g * history[p]
    taps = s0, s1, s2, s3, s4, s5, s6, s7, s8
    for index, total in enumerate((*taps, of_history, of_grad)):
        totals[index] += total


@compiled
def weighted_sum(start, stop, grid, shape, x, values, out, weights, offset):
    """Write out = sum_s weights_s values_s + offset + x."""
    has_x = x != 0
    x, out = map_at(x, shape), map_at(out, shape)
    pixels = shape[1]
    for plane in range(start, stop):
        for first in range(0, pixels, BLOCK):
            end = min(first + BLOCK, pixels)
            y = out[plane, first:end]
            plane_offset = offset[plane]
            for p in range(len(y)):
                y[p] = plane_offset
            for s in range(len(values)):
                value = map_at(values[s], shape)
                add_scaled(y, value[plane, first:end], weights[plane, s])
            if has_x:
                add_scaled(y, x[plane, first:end], float32(1))


@compiled
def weighted_sum_backward(start, stop, grid, shape, grad, values, grads, weights, sums):
    """Add weights_s grad to each gradient; write the sums of grad times each value."""
    grad = map_at(grad, shape)
    pixels = shape[1]
    group = max(GROUP // pixels, 1)
    for first_plane in range(start, stop, group):
        for s in range(len(values)):
            value = map_at(values[s], shape)
            grad_value = map_at(grads[s], shape)
            for plane in range(first_plane, min(first_plane + group, stop)):
                w = weights[plane, s]
                total = 0.0
                for first in range(0, pixels, BLOCK):
                    end = min(first + BLOCK, pixels)
                    g, v = grad[plane, first:end], value[plane, first:end]
                    of_block = float32(0)
                    for p in range(len(g)):
                        of_block += g[p] * v[p]
                    total += of_block
                    add_scaled(grad_value[plane, first:end], g, w)
                sums[plane, s] = total
