"""Warnings of the checks before a run, kept for the run's log: they are given before its log file exists."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

LOGGED = "logged_by_mrla_mm"  # attribute of a Runner: the warnings that its log has


@contextmanager
def collected(*, silent: bool = False) -> Iterator[list[str]]:
    """Collect the texts of the warnings given inside; unless silent, they are given at the end as ever.

    Those of other categories than UserWarning, a library's FutureWarning for example, are not the checks': they are
    given in any case.
    """
    messages, given = [], []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                yield messages
            finally:
                ours = [each for each in caught if issubclass(each.category, UserWarning)]
                messages += dict.fromkeys(str(each.message) for each in ours)
                given += [each for each in caught if not silent or each not in ours]
    finally:
        for each in given:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


def log_quietly(runner: object, messages: Sequence[str]) -> None:
    """Write warnings that the console has shown to the run's log files, and note that they are there.

    The runner may be a class of the user's own, with no logger of mmengine's: then nothing is written.
    """
    logger = getattr(runner, "logger", None)
    for handler in getattr(logger, "handlers", ()):
        if isinstance(handler, logging.FileHandler):
            for message in messages:
                handler.handle(logging.LogRecord(logger.name, logging.WARNING, "", 0, message, None, None))
    with suppress(AttributeError):  # of a class with slots
        setattr(runner, LOGGED, list(messages))


def log_new(runner: object, messages: Sequence[str]) -> None:
    """Give those warnings that the run's log does not have yet, on the console and in the log if the runner has one."""
    known = getattr(runner, LOGGED, [])
    give = getattr(getattr(runner, "logger", None), "warning", print)
    for message in messages:
        if message not in known:
            give(message)
