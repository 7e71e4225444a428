"""The passes over float32 maps as loops that numba compiles, and the threads that share them out.

`contiguous` and `channels_last` have the same five functions, each of which reads and writes a map
once, for the units of work from start to stop: planes of a sample and channel, or bands of rows.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numba
import torch

LOGGER = logging.getLogger("mrla_mm")
MIN_SHARED = 2**15  # elements of a map below which sharing it costs more than it saves
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


class Threads:
    """Threads that help whoever calls, as many as torch would use.

    A caller does every piece of work that no helper has begun, so it never waits for a thread that
    is busy, late, or was left behind by a fork.
    """

    def __init__(self) -> None:
        self.reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Forget the threads, which a forked process does not have."""
        self._lock = threading.Lock()
        self._executor = None

    def run(self, loop: Callable, units: int, numel: int, *args: object) -> None:
        """Call loop(start, stop, *args) for all units of a map of numel elements."""
        helpers = min(count_threads(numel), units) - 1
        if not loop.signatures:
            compile_first(loop, *args)
        if helpers < 1:
            loop(0, units, *args)
            return
        count = min((helpers + 1) * PIECES, units)
        bounds = [units * i // count for i in range(count + 1)]
        pieces = deque(zip(bounds[:-1], bounds[1:], strict=True))

        def work():
            while pieces:
                try:
                    start, stop = pieces.popleft()
                except IndexError:
                    return
                loop(start, stop, *args)

        futures = []
        try:
            # Where no thread can start, as while the interpreter shuts down, the caller does all.
            with suppress(RuntimeError):
                for _ in range(helpers):
                    futures.append(self.executor().submit(work))
            work()
        finally:
            pieces.clear()  # after an error no helper may go on with memory that is freed
            for future in futures:
                if not future.cancel():
                    future.result()

    def executor(self) -> ThreadPoolExecutor:
        """The threads of this process, which start when there is work for them."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(os.cpu_count(), "mrla_mm")
            return self._executor


def compile_first(loop: Callable, *args: object) -> None:
    """Compile a loop, or load it from the cache, by a call without work; log what takes long."""
    start = time.perf_counter()
    loop(0, 0, *args)
    seconds = time.perf_counter() - start
    if seconds > 1:
        name = f"{loop.__module__}.{loop.__name__}"
        place = loop.stats.cache_path or "no place to keep it was found"
        LOGGER.warning("numba compiled %s in %.1f s (%s)", name, seconds, place)


def count_threads(numel: int) -> int:
    """Number of threads for a map of numel elements."""
    return torch.get_num_threads() if numel >= MIN_SHARED else 1
