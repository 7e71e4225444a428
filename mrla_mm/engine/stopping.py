"""SIGTERM during training: recorded, and handled after the iteration in progress."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from ctypes import c_byte
from functools import cache, partial
from multiprocessing.util import Finalize

import torch
from mmengine.dist import all_reduce, get_world_size
from mmengine.runner import BaseLoop
from torch.utils.data import DataLoader

TERMINATED = 128 + signal.SIGTERM
AGREE_EVERY = 5  # iterations between two collectives that ask whether any process is to stop


class StopRequest:
    """A signal handler that records a SIGTERM; a cluster sends it some seconds before SIGKILL."""

    received = False

    def __call__(self, *_: object) -> None:
        """Note the signal."""
        self.received = True

    def handle_while_running(self, loop: BaseLoop) -> None:
        """Handle the signal during a loop's next run; pass on one that came too late to end it."""
        run = loop.run  # wrapped, since mmengine calls no hook after an exception

        def handling_run() -> object:
            loop.run = run
            if threading.current_thread() is not threading.main_thread():
                return run()  # Python handles signals in the main thread alone
            default_sigterm_in_forks()
            previous = signal.signal(signal.SIGTERM, self)
            try:
                result = run()
            finally:
                signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
            if self.received:
                signal.raise_signal(signal.SIGTERM)
            return result

        loop.run = handling_run

    def agreed(self, iteration: int) -> bool:
        """Whether any process is to stop; all get the same answer at the same iteration."""
        if get_world_size() == 1:
            return self.received
        if iteration % AGREE_EVERY:
            return False
        answer = torch.tensor(int(self.received))
        all_reduce(answer, "max")
        return bool(answer)


@cache
def default_sigterm_in_forks() -> None:
    """End forked processes at a SIGTERM, however early it comes.

    Python discards the signals that a new process handles before its after-fork step, and whoever
    terminates and joins it, as multiprocessing's pools do, would wait forever. So the signal is
    blocked while forking: it stays pending until the new process has the default action.
    """
    if not hasattr(os, "register_at_fork"):  # Windows does not fork
        return
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM})

    def reset() -> None:
        if isinstance(signal.getsignal(signal.SIGTERM), StopRequest):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


def start_worker(ended: c_byte, init: Callable[[int], None] | None, worker: int) -> None:
    """Start a loader's worker that ends at a SIGTERM only once the training has ended."""
    signal.signal(signal.SIGTERM, lambda *_: ended.value and os._exit(0))
    if init is not None:
        init(worker)


def outlive_sigterm(loader: object) -> None:
    """Let the workers that a loader will start outlive a SIGTERM while their parent trains."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    ended = multiprocessing.RawValue("b", 0)
    # Before multiprocessing joins its children; atexit would be too late in a child of its own.
    Finalize(None, setattr, (ended, "value", 1), exitpriority=0)
    loader.worker_init_fn = partial(start_worker, ended, loader.worker_init_fn)
