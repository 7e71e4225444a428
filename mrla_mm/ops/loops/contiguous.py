"""Loops over contiguous maps, seen as (planes, H * W); a unit of work is a plane (b, c).

A coefficient is one value for each plane. A map that is absent has no planes.
"""

import numpy as np
from numba import float32

from mrla_mm.ops.loops import GRAD, HISTORY, SUMS, compiled, map_at

BLOCK = 1024  # pixels that stay in a core's first cache from one loop to the next
GROUP = 16 * BLOCK  # pixels of a gradient that stay in its second cache, value after value


@compiled
def add_relu(start, stop, grid, c, shortcut, x, sums):
    """Write x = relu(c + shortcut), NaN included, and its sum over each plane."""
    pixels = x.shape[1]
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
def convolve(start, stop, grid, x, weight, offset, history, slope, relu_output, out, grad_history):
    """Write out = dw(x; weight) + offset + slope history, but 0 where relu_output is 0 or less.

    If asked for, write grad_history = slope x too, plus out where there is a `relu_output`.
    """
    height, width, _ = grid
    rows = min(height, max(BLOCK // width, 1))
    shifted = np.empty((3, (rows + 2) * width), np.float32)
    for plane in range(start, stop):
        plane_offset = offset[plane]
        plane_slope = slope[plane]
        for first in range(0, height, rows):
            begin, end = first * width, min(first + rows, height) * width
            y = out[plane, begin:end]
            pixels = x[plane, begin:end]
            if weight.shape[1] == 1:
                w = weight[plane, 0]
                for p in range(len(y)):
                    y[p] = plane_offset + w * pixels[p]
            else:
                shift_rows(x[plane], begin, end, width, shifted)
                convolve_rows(y, weight[plane], plane_offset, width, shifted)
            if len(history) > 0:
                add_scaled(y, history[plane, begin:end], plane_slope)
            if len(relu_output) > 0:
                z = relu_output[plane, begin:end]
                for p in range(len(y)):
                    y[p] = float32(0) if z[p] <= 0 else y[p]
            if len(grad_history) > 0:
                z = grad_history[plane, begin:end]
                for p in range(len(y)):
                    z[p] = plane_slope * pixels[p]
                if len(relu_output) > 0:
                    add_scaled(z, y, float32(1))


@compiled
def add_scaled(out, x, factor):
    """Add factor x to out."""
    for p in range(len(out)):
        out[p] += factor * x[p]


@compiled
def grid_sums(start, stop, grid, grad, x, history, sums):
    """Write sums over each plane of grad times x at the kernel's 9 taps, history, and 1."""
    height, width, _ = grid
    rows = min(height, max(BLOCK // width, 1))
    shifted = np.empty((3, (rows + 2) * width), np.float32)
    totals = np.empty(SUMS)
    for plane in range(start, stop):
        totals[:] = 0
        for first in range(0, height, rows):
            begin, end = first * width, min(first + rows, height) * width
            shift_rows(x[plane], begin, end, width, shifted)
            g = grad[plane, begin:end]
            add_nine_sums(g, width, shifted, totals)
            of_grad = of_history = float32(0)
            for p in range(len(g)):
                of_grad += g[p]
            if len(history) > 0:
                h = history[plane, begin:end]
                for p in range(len(g)):
                    of_history += g[p] * h[p]
            totals[HISTORY] += of_history
            totals[GRAD] += of_grad
        sums[plane] = totals


@compiled
def shift_rows(x, begin, end, width, shifted):
    """Copy pixels of a plane, whole rows and one more above and below, as each column sees them.

    They are the left neighbour of every pixel, the pixel, its right neighbour; 0 beyond the plane.
    So each tap of a kernel is one long loop, whatever the width.
    """
    left, middle, right = row_of_kernel(shifted, 0)
    size = end - begin + 2 * width
    first = max(begin - width, 0)
    rows = x[first : min(end + width, len(x))]
    margin = first - (begin - width)
    for p in range(margin):
        left[p] = middle[p] = right[p] = 0
    for p in range(margin + len(rows), size):
        left[p] = middle[p] = right[p] = 0
    left, middle, right = row_of_kernel(shifted, margin)
    after_left, after_first = left[1:], rows[1:]
    for p in range(len(rows)):
        middle[p] = rows[p]
    for p in range(len(rows) - 1):
        after_left[p] = rows[p]
    for p in range(len(rows) - 1):
        right[p] = after_first[p]
    for p in range(0, len(rows), width):
        left[p] = 0
        right[p + width - 1] = 0


@compiled
def row_of_kernel(shifted, start):
    """What `shift_rows` copied, from one row on."""
    return shifted[0, start:], shifted[1, start:], shifted[2, start:]


@compiled
def convolve_rows(out, weight, offset, width, shifted):
    """Write the convolution of the pixels that `shift_rows` copied, plus an offset."""
    w0, w1, w2 = weight[0], weight[1], weight[2]
    w3, w4, w5 = weight[3], weight[4], weight[5]
    w6, w7, w8 = weight[6], weight[7], weight[8]
    left0, middle0, right0 = row_of_kernel(shifted, 0)
    left1, middle1, right1 = row_of_kernel(shifted, width)
    left2, middle2, right2 = row_of_kernel(shifted, 2 * width)
    for p in range(len(out)):
        above = w0 * left0[p] + w1 * middle0[p] + w2 * right0[p]
        at = w3 * left1[p] + w4 * middle1[p] + w5 * right1[p]
        below = w6 * left2[p] + w7 * middle2[p] + w8 * right2[p]
        out[p] = offset + above + at + below


@compiled
def add_nine_sums(grad, width, shifted, totals):
    """Add the sums of a gradient times what is under each tap of the kernel."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = s8 = float32(0)
    left, middle, right = row_of_kernel(shifted, 0)
    left1, middle1, right1 = row_of_kernel(shifted, width)
    left2, middle2, right2 = row_of_kernel(shifted, 2 * width)
    for p in range(len(grad)):
        g = grad[p]
        s0 += g * left[p]
        s1 += g * middle[p]
        s2 += g * right[p]
        s3 += g * left1[p]
        s4 += g * middle1[p]
        s5 += g * right1[p]
        s6 += g * left2[p]
        s7 += g * middle2[p]
        s8 += g * right2[p]
    for tap, total in enumerate((s0, s1, s2, s3, s4, s5, s6, s7, s8)):
        totals[tap] += total


@compiled
def weighted_sum(start, stop, grid, x, values, weights, offset, out):
    """Write out = sum_s weights_s values_s + offset + x, the values by their addresses."""
    pixels = out.shape[1]
    for plane in range(start, stop):
        for first in range(0, pixels, BLOCK):
            end = min(first + BLOCK, pixels)
            y = out[plane, first:end]
            plane_offset = offset[plane]
            for p in range(len(y)):
                y[p] = plane_offset
            for s in range(len(values)):
                value = map_at(values[s], out.shape)
                add_scaled(y, value[plane, first:end], weights[plane, s])
            if len(x) > 0:
                add_scaled(y, x[plane, first:end], float32(1))


@compiled
def weighted_sum_backward(start, stop, grid, grad, values, weights, grads, sums):
    """Add weights_s grad to each gradient; write the sums of grad times each value."""
    pixels = grad.shape[1]
    group = max(GROUP // pixels, 1)
    for first_plane in range(start, stop, group):
        for s in range(len(values)):
            value = map_at(values[s], grad.shape)
            grad_value = map_at(grads[s], grad.shape)
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
