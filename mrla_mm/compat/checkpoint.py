"""Loading mmengine's checkpoints with ``weights_only``, torch's restricted unpickler.

torch >= 2.6 loads nothing but tensors and plain containers unless told otherwise. mmengine 0.10
also stores its log history (``HistoryBuffer``, numpy arrays) and numpy scalars, so it cannot read
its own checkpoints back. Exactly those names are allowed here, two of them by a stricter stand-in:

* ``HistoryBuffer`` pickles a registry of functions with every instance, and its ``__setstate__``
  merges that registry into the class for the whole process. The stand-in restores the numbers
  alone.
* That registry is pickled as ``getattr(HistoryBuffer, 'mean')``. Allowing ``getattr`` would open
  every attribute of every allowed object, so the name is bound to a function that knows those four
  methods and nothing else.
"""

from pickle import UnpicklingError

import numpy as np
from mmengine.logging.history_buffer import HistoryBuffer

_STATISTICS = ("min", "max", "current", "mean")


class _LogHistory(HistoryBuffer):
    """A HistoryBuffer being unpickled: takes its history alone and turns into a plain one."""

    def __setstate__(self, state: dict) -> None:
        self.__class__ = HistoryBuffer
        self.__init__(max_length=state["max_length"])
        self._log_history = state["_log_history"]
        self._count_history = state["_count_history"]


def _statistic(owner: type, name: str) -> str:
    """Stand in for ``getattr`` in a checkpoint: return the name of one of the four methods."""
    if owner is not _LogHistory or name not in _STATISTICS:
        raise UnpicklingError(
            f"the checkpoint asks for the attribute {name!r} of {owner!r}, which is not allowed"
        )
    return name


def allowed_types() -> list:
    """Return what mmengine saves, with its name in a file, whether numpy 1 or 2 wrote it."""
    reconstruct = np.zeros(1).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    allowed = [
        (_LogHistory, "mmengine.logging.history_buffer.HistoryBuffer"),
        (_statistic, "builtins.getattr"),
        (np.ndarray, "numpy.ndarray"),
        (np.dtype, "numpy.dtype"),
    ]
    for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
        allowed += [(reconstruct, f"{core}._reconstruct"), (scalar, f"{core}.scalar")]
    # The class of a dtype object, which sets its byte order. Files do not name it; the name keeps
    # OneDL's mmengine from taking it off torch's list again.
    numbers = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
    classes = [type(np.dtype(name)) for name in (*numbers, "float16", "float32", "float64")]
    return allowed + [(each, f"numpy.dtypes.{each.__name__}") for each in classes]
