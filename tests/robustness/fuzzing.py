"""What every fuzz test shares: how many examples, what counts as an outcome, and the count of outcomes."""

import os
from collections import Counter, defaultdict

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

# Examples for one of the suite's; `make fuzz` sets it. Without it every run tries the same few examples.
EFFORT = int(os.environ.get("MRLA_FUZZ", "1"))
OUTCOMES = defaultdict(Counter)  # of each target, reported at the end of a session

JUNK = st.sampled_from(
    [None, True, False, -1, 0, 1, 2, 7, 0.5, -0.5, float("nan"), float("inf"), "", "x", "3", (), [], [0], (1, 2)]
    + [(1, 2, 2, 2), [None], ["x"], {}, {"type": "Nope"}, {"x": 1}, b"x", range(3)]
)


def fuzz(examples):
    """Settings of a fuzz test that takes so many examples in the suite."""
    return settings(
        max_examples=examples * EFFORT,
        derandomize=EFFORT == 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),  # most inputs hang on a seed, which nothing shrinks
    )


def mostly(valid):
    """Values of a strategy, and now and then anything at all."""
    return st.one_of(valid, valid, valid, valid, JUNK)


def some_of(arguments, limit=4):
    """Dictionaries with a few of the arguments, each mostly valid."""
    names = st.lists(st.sampled_from(sorted(arguments)), unique=True, max_size=limit)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: mostly(arguments[name]) for name in chosen}))


def judge(target, action, *, named=()):
    """Count what becomes of an input: it works, or ends on an error that names it; any other error is a failure.

    `named` are words, one of which the error must have.
    """
    try:
        action()
    except (ValueError, TypeError) as error:
        message = str(error)
        assert not named or any(str(word) in message for word in named), f"{message!r} names none of {named}"
        OUTCOMES[target]["refused"] += 1
        return error
    OUTCOMES[target]["worked"] += 1
    return None
