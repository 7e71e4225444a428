"""Loading mmengine's checkpoints with ``weights_only``, torch's restricted unpickler.

mmengine 0.10 also stores its log history (``HistoryBuffer``, numpy arrays) and numpy scalars, so
with torch >= 2.6 it cannot read its own checkpoints back. Exactly those names are allowed here,
each by a stricter stand-in, since an unpickler calls what is allowed with any arguments and gives
any state to what it returns. ``HistoryBuffer`` pickles a registry of functions, as
``getattr(HistoryBuffer, 'mean')``, and merges it into the class for the whole process; numpy makes
an array of any memory: of bytes that it takes for pointers to objects, by a dtype that claims
another size, or of a buffer that it frees while a tensor still reads it.

Others may allow the originals under the same names, before or after, and which of the two torch
takes is chance. Then a stand-in reads what its original reads.
"""

from pickle import UnpicklingError

import numpy as np
import torch
from mmengine.logging.history_buffer import HistoryBuffer

_STATISTICS = ("min", "max", "current", "mean")
_CODES = ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]  # kind and size


_scalar_of_numpy, _ = np.float64(0).__reduce__()


def _is_allowed(original: object) -> bool:
    """Whether others allow the original of a stand-in."""
    get_safe_globals = getattr(torch.serialization, "get_safe_globals", list)  # of newer torch
    allowed = (each[0] if type(each) is tuple else each for each in get_safe_globals())
    return any(each is original for each in allowed)


class _LogHistory(HistoryBuffer):
    """A HistoryBuffer being unpickled: takes its history alone and turns into a plain one."""

    def __setstate__(self, state: dict) -> None:
        max_length = state["max_length"]
        histories = [state["_log_history"], state["_count_history"]]
        if type(max_length) is not int or not all(isinstance(h, np.ndarray) for h in histories):
            raise UnpicklingError("the attribute HistoryBuffer.data is not made of numbers")
        self.__class__ = HistoryBuffer
        self.__init__(max_length=max_length)
        self._log_history, self._count_history = map(np.array, histories)


class _Array(np.ndarray):
    """An array being unpickled: takes numbers, once, and is pickled as a plain array."""

    is_filled = False

    def __new__(cls, *arguments: object) -> "_Array":
        if arguments:
            raise UnpicklingError("the class numpy.ndarray is not to be called")
        return super().__new__(cls, 0, "S1")  # which no tensor can share

    def __setstate__(self, state: tuple) -> None:
        if _is_allowed(np.ndarray):
            super().__setstate__(state)
            return
        version, shape, dtype, is_fortran, content = state
        if self.is_filled or type(content) is not bytes:
            raise UnpicklingError("the class numpy.ndarray takes bytes, and those once")
        # a dtype as its name says: its state, from the file, may claim anything
        super().__setstate__((version, shape, _dtype(dtype.str), is_fortran, content))
        self.is_filled = True

    def __reduce__(self) -> tuple:
        return np.asarray(self).__reduce__()


def _reconstruct(*_: object) -> _Array:
    """Stand in for numpy's function of this name: return an array that waits for its state."""
    return _Array()


def _dtype(code: str, *flags: object) -> np.dtype:
    """Stand in for ``numpy.dtype``: return a copy, whose state sets the byte order."""
    if _is_allowed(np.dtype):
        return np.dtype(code, *flags)
    if type(code) is not str or code.lstrip("<>|") not in _CODES:
        raise UnpicklingError(f"the class numpy.dtype is allowed for numbers, not for {code!r}")
    return np.dtype(code, copy=True)


def _scalar(dtype: np.dtype, content: bytes) -> np.generic:
    """Stand in for numpy's function of this name: return a number."""
    if _is_allowed(_scalar_of_numpy):
        return _scalar_of_numpy(dtype, content)
    (number,) = np.frombuffer(content, _dtype(dtype.str))
    return number


def _statistic(owner: type, name: str) -> object:
    """Stand in for ``getattr`` in a checkpoint: return one of the four methods."""
    if _is_allowed(getattr):
        return getattr(owner, name)
    if owner not in (_LogHistory, HistoryBuffer) or name not in _STATISTICS:
        raise UnpicklingError(f"the attribute {name!r} of {owner!r} is not allowed")
    return getattr(HistoryBuffer, name)


def allowed_types() -> list:
    """Return what mmengine saves, with its name in a file, whether numpy 1 or 2 wrote it."""
    allowed = [
        (_LogHistory, "mmengine.logging.history_buffer.HistoryBuffer"),
        (_statistic, "builtins.getattr"),
        (_Array, "numpy.ndarray"),
        (_Array, "_Array"),  # takes its state even if others put numpy's class under its name
        (_dtype, "numpy.dtype"),
    ]
    for core in ("numpy.core.multiarray", "numpy._core.multiarray"):
        allowed += [(_reconstruct, f"{core}._reconstruct"), (_scalar, f"{core}.scalar")]
    # The class of a dtype object, which sets its byte order. Files do not name it; the name keeps
    # OneDL's mmengine from taking it off torch's list again.
    classes = [type(np.dtype(code)) for code in _CODES]
    return allowed + [(each, f"numpy.dtypes.{each.__name__}") for each in classes]
