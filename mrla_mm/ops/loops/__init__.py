"""The passes over float32 maps as loops that numba compiles, shared out to torch's threads.

`contiguous` and `channels_last` have the same five functions, each of which writes every map once,
for the units of work from start to stop: planes of a sample and channel, or bands of rows. After
these come grid, which is (height, width, bands), the shape that maps are seen in, and the maps.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

import numba
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from mrla_mm.torch_support import Region, openmp_parallel

LOGGER = logging.getLogger("mrla_mm")
MIN_SHARED = 2**15  # elements of a map below which sharing it costs more than it saves
TAPS = 9  # of the value's kernel
HISTORY = TAPS  # where `grid_sums` has the sum of the history, behind those of the taps
GRAD = TAPS + 1  # and the sum of the gradient
SUMS = TAPS + 2
PIECES = 4  # for each thread: one that is late leaves its share to the others


def compiled(function: Callable) -> Callable:
    """Compile a function at its first call, and cache it where numba finds a place to write.

    A sum may be reordered into vectors, once and for all when it is compiled.
    """
    options = dict(nogil=True, error_model="numpy", fastmath={"contract", "reassoc"})
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no such place
        return numba.njit(function, **options)


@intrinsic
def as_pointer(typing_context, address):
    """Pointer to float32 at an address."""
    signature = types.CPointer(types.float32)(types.int64)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], ir.FloatType().as_pointer())

    return signature, generate


@compiled
def map_at(address, shape):
    """The float32 map of a shape at an address; a loop takes any number of addresses."""
    return carray(as_pointer(address), shape)


def share(loop: Callable, units: int, numel: int, *args: object) -> None:
    """Call loop(start, stop, *args) for all units of a map of numel elements, on torch's threads.

    Other threads would compete with torch's, which spin for a while after each operator.
    """
    if not loop.signatures:
        compile_first(loop, *args)
    threads = min(count_threads(numel), units)
    if threads == 1:
        loop(0, units, *args)
        return
    count = min(threads * PIECES, units)
    bounds = [units * i // count for i in range(count + 1)]
    pieces = deque(zip(bounds[:-1], bounds[1:], strict=True))
    errors = []

    def work(_: object) -> None:
        try:
            while pieces:
                start, stop = pieces.popleft()
                loop(start, stop, *args)
        except IndexError:  # another thread took the last piece
            pass
        except BaseException as error:  # which C would drop
            errors.append(error)
            pieces.clear()

    openmp_parallel()(Region(work), None, threads, 0)
    if errors:
        raise errors[0]


def compile_first(loop: Callable, *args: object) -> None:
    """Compile a loop, or load it from the cache, by a call without work; log what takes long."""
    start = time.perf_counter()
    loop(0, 0, *args)
    seconds = time.perf_counter() - start
    if seconds > 1:
        place = loop.stats.cache_path or "no place to keep it was found"
        LOGGER.warning("numba compiled %s in %.1f s (%s)", loop.__name__, seconds, place)


def count_threads(numel: int) -> int:
    """Number of threads for a map of numel elements."""
    return torch.get_num_threads() if numel >= MIN_SHARED and openmp_parallel() else 1
