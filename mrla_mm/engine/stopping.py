"""A SIGTERM while a run trains, kept until the run can act on it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize

import torch
from mmengine.dist import all_reduce, get_world_size
from mmengine.runner import BaseLoop
from torch.utils.data import DataLoader

TERMINATED = 128 + signal.SIGTERM
AGREE_EVERY = 5  # iterations between two collectives that ask whether any process is to stop


class StopRequest:
    """Notes a SIGTERM, which a cluster sends some seconds before it kills."""

    def __init__(self) -> None:
        self.received = False

    def handle_while_running(self, loop: BaseLoop) -> None:
        """Handle the signal during a loop's next run, however that ends; mmengine calls no hook after an exception.

        A signal that came too late to end the run is then passed on. Only a process's main thread
        can handle signals.
        """
        run = loop.run

        def handling_run() -> object:
            loop.run, self.received = run, False
            if threading.current_thread() is not threading.main_thread():
                return run()
            process = os.getpid()

            def note(*_: object) -> None:
                self.received = True
                if (
                    os.getpid() != process
                ):  # a process forked by a metric, for example, has nothing to save
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    signal.raise_signal(signal.SIGTERM)

            previous = signal.signal(signal.SIGTERM, note)
            try:
                result = run()
            finally:
                signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)
            if self.received:
                signal.raise_signal(signal.SIGTERM)
            return result

        loop.run = handling_run

    def agreed(self, iteration: int) -> bool:
        """Whether any process of the run is to stop; all get the same answer at the same iteration."""
        if get_world_size() == 1:
            return self.received
        if iteration % AGREE_EVERY:
            return False
        answer = torch.tensor(int(self.received))
        all_reduce(answer, "max")
        return bool(answer)


class OutliveSigterm:
    """A loader's `worker_init_fn`: its workers live through a SIGTERM to the whole job while their parent trains."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init
        self.ended = multiprocessing.RawValue("b", 0)
        # Before multiprocessing terminates and awaits its children; atexit would be too late in a
        # child of its own.
        Finalize(None, setattr, (self.ended, "value", 1), exitpriority=0)

    def __call__(self, worker: int) -> None:
        """Start the worker of this number."""
        signal.signal(signal.SIGTERM, lambda *_: self.ended.value and os._exit(0))
        if self.init is not None:
            self.init(worker)


def outlive_sigterm(loader: object) -> None:
    """Let the workers that a loader will start outlive a SIGTERM."""
    if (
        isinstance(loader, DataLoader)
        and loader.num_workers
        and not isinstance(loader.worker_init_fn, OutliveSigterm)
    ):
        loader.worker_init_fn = OutliveSigterm(loader.worker_init_fn)
