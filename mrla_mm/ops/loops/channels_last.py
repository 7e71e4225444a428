"""Loops over channels-last maps, seen as (B, H * W, C); a unit of work is a band of rows.

Maps are given by their addresses, 0 for one that is absent. A coefficient is C values for each
sample. What is summed over a band is summed row by row first, so that rounding errors stay small.
"""

import numpy as np
from numba import float32

from mrla_mm.ops.loops import GRAD, HISTORY, TAPS, compiled, map_at


@compiled
def band(unit, grid):
    """The sample of a unit, and its first row and the one after its last."""
    height, _, bands = grid
    sample, index = unit // bands, unit % bands
    return sample, height * index // bands, height * (index + 1) // bands


@compiled
def add_scaled(out, x, factor):
    """Add factor x to out."""
    for i in range(len(out)):
        out[i] += factor[i] * x[i]


@compiled
def move_sums(sums, of_row):
    """Add the sums of a row to those of its band, and clear them."""
    for k in range(len(sums)):
        for i in range(sums.shape[1]):
            sums[k, i] += of_row[k, i]
            of_row[k, i] = 0


@compiled
def add_relu(start, stop, grid, shape, c, shortcut, x, sums):
    """Write x = relu(c + shortcut), NaN included, and its sums over each band."""
    c, shortcut, x = map_at(c, shape), map_at(shortcut, shape), map_at(x, shape)
    width = grid[1]
    of_row = np.zeros(sums.shape[1:], np.float32)
    for unit in range(start, stop):
        sample, first, end = band(unit, grid)
        for row in range(first, end):
            for pixel in range(row * width, (row + 1) * width):
                c_pixel = c[sample, pixel]
                shortcut_pixel = shortcut[sample, pixel]
                x_pixel = x[sample, pixel]
                total = of_row[0]
                for i in range(len(total)):
                    value = c_pixel[i] + shortcut_pixel[i]
                    value = float32(0) if value < 0 else value
                    x_pixel[i] = value
                    total[i] += value
            move_sums(sums[unit], of_row)


@compiled
def convolve(
    start, stop, grid, shape, x, history, relu_output, out, grad_history, weight, offset, slope
):
    """Write what the function of this name over contiguous maps does."""
    has_history, has_relu, has_grad_history = history != 0, relu_output != 0, grad_history != 0
    x, history, relu_output = map_at(x, shape), map_at(history, shape), map_at(relu_output, shape)
    out, grad_history = map_at(out, shape), map_at(grad_history, shape)
    height, width, _ = grid
    zeros = np.zeros(shape[2], np.float32)
    for unit in range(start, stop):
        sample, first, end = band(unit, grid)
        sample_offset = offset[sample]
        sample_slope = slope[sample]
        for row in range(first, end):
            for column in range(width):
                pixel = row * width + column
                y = out[sample, pixel]
                for i in range(len(y)):
                    y[i] = sample_offset[i]
                x_pixel = x[sample, pixel]
                if weight.shape[1] == 1:
                    add_scaled(y, x_pixel, weight[sample, 0])
                else:
                    for r in range(max(row - 1, 0), min(row + 2, height)):
                        at = r * width + column
                        left = x[sample, at - 1] if column > 0 else zeros
                        middle = x[sample, at]
                        right = x[sample, at + 1] if column < width - 1 else zeros
                        tap = 3 * (r - row + 1)
                        w0 = weight[sample, tap]
                        w1 = weight[sample, tap + 1]
                        w2 = weight[sample, tap + 2]
                        for i in range(len(y)):
                            y[i] += w0[i] * left[i] + w1[i] * middle[i] + w2[i] * right[i]
                if has_history:
                    add_scaled(y, history[sample, pixel], sample_slope)
                if has_relu:
                    relu_y = relu_output[sample, pixel]
                    for i in range(len(y)):
                        y[i] = float32(0) if relu_y[i] <= 0 else y[i]
                if has_grad_history:
                    grad_h = grad_history[sample, pixel]
                    for i in range(len(y)):
                        grad_h[i] = sample_slope[i] * x_pixel[i]
                    if has_relu:
                        for i in range(len(y)):
                            grad_h[i] += y[i]


@compiled
def grid_sums(start, stop, grid, shape, grad, x, history, sums):
    """Write sums over each band of grad times x at the kernel's 9 taps, history, and 1."""
    has_history = history != 0
    grad, x, history = map_at(grad, shape), map_at(x, shape), map_at(history, shape)
    height, width, _ = grid
    of_row = np.zeros(sums.shape[1:], np.float32)
    for unit in range(start, stop):
        sample, first, end = band(unit, grid)
        for row in range(first, end):
            for column in range(width):
                pixel = row * width + column
                g = grad[sample, pixel]
                for tap in range(TAPS):
                    r, c = row + tap // 3 - 1, column + tap % 3 - 1
                    if 0 <= r < height and 0 <= c < width:
                        add_scaled(of_row[tap], x[sample, r * width + c], g)
                if has_history:
                    add_scaled(of_row[HISTORY], history[sample, pixel], g)
                total = of_row[GRAD]
                for i in range(len(g)):
                    total[i] += g[i]
            move_sums(sums[unit], of_row)


@compiled
def weighted_sum(start, stop, grid, shape, x, values, out, weights, offset):
    """Write out = sum_s weights_s values_s + offset + x."""
    has_x = x != 0
    x, out = map_at(x, shape), map_at(out, shape)
    width = grid[1]
    for unit in range(start, stop):
        sample, first, end = band(unit, grid)
        sample_offset = offset[sample]
        for pixel in range(first * width, end * width):
            y = out[sample, pixel]
            for i in range(len(y)):
                y[i] = sample_offset[i]
            for s in range(len(values)):
                value = map_at(values[s], shape)
                add_scaled(y, value[sample, pixel], weights[sample, s])
            if has_x:
                x_pixel = x[sample, pixel]
                for i in range(len(y)):
                    y[i] += x_pixel[i]


@compiled
def weighted_sum_backward(start, stop, grid, shape, grad, values, grads, weights, sums):
    """Add weights_s grad to each gradient; write the sums of grad times each value."""
    grad = map_at(grad, shape)
    width = grid[1]
    of_row = np.zeros(sums.shape[1:], np.float32)
    for unit in range(start, stop):
        sample, first, end = band(unit, grid)
        for row in range(first, end):
            for pixel in range(row * width, (row + 1) * width):
                g = grad[sample, pixel]
                for s in range(len(values)):
                    value = map_at(values[s], shape)
                    add_scaled(of_row[s], value[sample, pixel], g)
                    of_value = map_at(grads[s], shape)[sample, pixel]
                    add_scaled(of_value, g, weights[sample, s])
            move_sums(sums[unit], of_row)
