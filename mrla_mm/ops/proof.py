"""Compiled code proves itself: which layers it may run, and what has failed so far.

A path whose passes are compiled has a self-check in SELF_CHECKS. It runs once for each
specialisation, on the first layer that needs it, and what it finds stays in OUTCOMES. Code that
fails later is noted there too, and layers of that specialisation run naive from then on.
"""

import dataclasses
import os
import threading
import warnings
from typing import NamedTuple

import torch

from mrla_mm.errors import InputError
from mrla_mm.ops.passes import Passes

ENVIRONMENT = "MRLA_OPS"
# `self_check.self_check` by path; filled in by `mrla_mm.ops`, so that nothing imports in a circle.
SELF_CHECKS = {}
OUTCOMES = {}  # of self-checks in this process, by specialisation
SPECIALISATIONS = {}  # by form
LOCK = threading.Lock()  # self-checks change modes of the whole process, so they take turns
CHECKING = threading.local()  # `active` while this thread runs a self-check


class Form(NamedTuple):
    """All of a layer but its numbers: what compiled code may depend on.

    dtypes are those of its parameters, None for those it lacks; kernel_size is that of query and
    key, 0 without them; depth is T for base and MLA, 0 for light.
    """

    path: str
    device: torch.device
    dtype: torch.dtype
    channels_last: bool  # else contiguous
    shape: torch.Size
    heads: int
    kernel_size: int
    dtypes: tuple[torch.dtype | None, ...]
    add_relu: bool
    has_history: bool = False
    is_mla: bool = False
    depth: int = 0

    def settings(self) -> dict[str, object]:
        """Settings of the layer by the names that `Layer` and the functions of layers have."""
        settings = dict(heads=self.heads, add_relu=self.add_relu)
        return settings if self.depth else settings | dict(has_history=self.has_history)

    def specialisation(self, passes: Passes) -> "Form":
        """The form with the compile key in place of sizes: layers with equal ones run one code."""
        key = passes.compile_key(self.shape, self.heads, self.channels_last)
        return self._replace(shape=key, heads=None)


@dataclasses.dataclass(eq=False)
class Outcome:
    """Why a specialisation must not be used, or an empty string; its largest relative difference.

    `give_up` sets the failure when the code fails later.
    """

    failure: str
    difference: float


def prove(form: Form, passes: Passes) -> Outcome | None:
    """Outcome of the self-check for a layer, which runs if need be; None within a self-check.

    Raises:
        InputError: MRLA_OPS asks for the path, and it cannot run.
    """
    if getattr(CHECKING, "active", False):
        return None
    specialisation = SPECIALISATIONS.get(form)
    if specialisation is None:
        specialisation = SPECIALISATIONS[form] = form.specialisation(passes)
    outcome = OUTCOMES.get(specialisation)
    if outcome is None and form.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Outcome("it is not checked yet, nor can it be while a CUDA graph is captured", 0.0)
    if outcome is None:
        with LOCK:
            outcome = OUTCOMES.get(specialisation)
            outcome = outcome or run_self_check(form, specialisation, passes)
    if outcome.failure and os.environ.get(ENVIRONMENT) == form.path:
        raise InputError(
            f"{ENVIRONMENT}={form.path} cannot run here: {outcome.failure}; unset {ENVIRONMENT}"
        )
    return outcome


def run_self_check(form: Form, specialisation: Form, passes: Passes) -> Outcome:
    """Run a path's self-check and note its outcome; within it, failures of kernels are raised."""
    CHECKING.active = True
    try:
        failure, difference = SELF_CHECKS[form.path](form, passes)
    finally:
        CHECKING.active = False
    outcome = OUTCOMES[specialisation] = Outcome("", difference)
    if failure:
        give_up(outcome, f"the self-check of {form.path} on {form.device} failed: {failure}")
    return outcome


def give_up(outcome: Outcome, failure: str) -> None:
    """Note why a specialisation must not be used from now on, and warn once."""
    if outcome.failure:
        return
    outcome.failure = failure
    warnings.warn(
        f"layer attention of some shapes runs unfused from now on: {failure}. "
        "Please report this with what `python -m mrla_mm doctor` prints",
        stacklevel=2,
    )


def describe(error: Exception) -> str:
    """Return an error in one line of bounded length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def summary(path: str) -> str:
    """How many specialisations of a path were checked, and how the checks ended."""
    outcomes = [outcome for form, outcome in OUTCOMES.items() if form.path == path]
    difference = max((outcome.difference for outcome in outcomes), default=0.0)
    text = f"{len(outcomes)} specialisations checked, largest difference {difference:.1e}"
    failures = [outcome.failure for outcome in outcomes if outcome.failure]
    return f"{text}, {len(failures)} not used: {failures[0]}" if failures else text
