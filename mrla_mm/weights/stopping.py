"""A SIGTERM while a run trains: noted and said at once, acted on where the run can save, and never lost."""

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType

import torch
from mmengine.dist import all_reduce, get_world_size
from mmengine.runner import BaseLoop

from mrla_mm.errors import InputError

TERMINATED = 128 + signal.SIGTERM
AGREE_SECONDS, AGREE_STEPS = 2.0, 50  # how long the processes of a run wait at most to ask each other
NOTICE = "SIGTERM received: the run will save and end after the iteration in progress"


class StopRequest:
    """Notes a SIGTERM, which a cluster sends some seconds before it kills, until the run can act on it."""

    def __init__(self):
        self.received = False
        self.logger = logging.getLogger()
        self.steps = self.left = 0  # between two agreements, and until the next
        self.asked = -math.inf
        self.process, self.previous = 0, signal.SIG_DFL  # that listens, 0 for none; what it did before

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take over the signal, and give it back however the context ends; only a process's main thread can.

        A signal that came too late to stop anything, or to a run that ended by an error instead, is then passed on, so
        that it stops what the process does next.

        Raises:
            SystemExit: with code 143 in place of an error, which is printed, where SIGTERM would end the process:
                whoever catches errors to train something else was told to end.
        """
        self.received = False
        self.steps = self.left = 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self.note)
        previous = signal.SIG_DFL if previous is None else previous
        self.process, self.previous = os.getpid(), previous
        try:
            yield
        except SystemExit:  # the run's own end, or another's that ends the process too
            raise
        except BaseException as error:
            signal.signal(signal.SIGTERM, previous)
            if self.received and previous is signal.SIG_DFL:
                shown = [f"error: {error}\n"] if isinstance(error, InputError) else traceback.format_exception(error)
                print("".join(shown), end="", file=sys.stderr, flush=True)  # noqa: T201
                raise SystemExit(TERMINATED) from error
            if self.received:
                signal.raise_signal(signal.SIGTERM)
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)
        if self.received:
            signal.raise_signal(signal.SIGTERM)

    def listen_while_running(self, loop: BaseLoop, logger: logging.Logger) -> None:
        """Take over the signal for the loop's next run: mmengine calls no hook when a run ends by an exception."""
        run, self.logger = loop.run, logger

        def listening_run():
            loop.run = run
            with self.listening():
                return run()

        loop.run = listening_run

    def note(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Note the signal, and say once, on the console and in the log files, that the run is about to end.

        An iteration may take minutes. The interrupted code may be in the middle of logging or printing, which must not
        be entered twice: so the line goes to the files below their buffers. A process forked off the run, by a metric
        for example, inherits this handler, but has nothing to save: whoever ends it must not be kept waiting.
        """
        if number == signal.SIGTERM and self.process not in (0, os.getpid()):
            signal.signal(signal.SIGTERM, self.previous)
            signal.raise_signal(signal.SIGTERM)
            return
        if self.received:
            return
        self.received = True
        line = f"{time.strftime('%Y/%m/%d %H:%M:%S')} - {self.logger.name} - WARNING - {NOTICE}\n".encode()
        for handler in self.logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.level <= logging.WARNING:
                with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed stream, or one of no file
                    os.write(handler.stream.fileno(), line)

    def agreed(self) -> bool:
        """Whether any process of the run was asked to stop: all get the same answer, so all stop at one iteration.

        Asking takes a collective, and on GPUs waits for them. So processes ask about every two seconds: each time they
        also agree on how many of the slowest one's iterations that is.
        """
        if get_world_size() == 1:
            return self.received
        self.left -= 1
        if self.left > 0:
            return False
        elapsed = (time.monotonic() - self.asked) / max(self.steps, 1)
        steps = min(max(int(AGREE_SECONDS / max(elapsed, 1e-6)), 1), AGREE_STEPS)
        answer = torch.tensor([int(self.received), -steps])
        all_reduce(answer, "max")
        stop, steps = answer.tolist()
        self.steps = self.left = -steps
        self.asked = time.monotonic()
        return bool(stop)
