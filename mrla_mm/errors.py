"""The error that invalid user input raises."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """A value the user gave cannot work; the message names the value and the remedy.

    The command line tools print its message alone, without a traceback.
    """


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", least: float = 0.6) -> str:
    """Return a hint at the nearest known name; an empty text if none is at `least` so similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=least)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
