"""What a checkpoint holds: a state dict, inside entries of the file and wrappers of the model."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from mrla_mm.errors import InputError

# Entries that hold a state dict, the preferred first: a file with a model and its moving average
# gives the model. mmengine swaps the two when it saves, so its `state_dict` is the average already.
ENTRIES = ("state_dict", "model", "ema_state_dict", "state_dict_ema", "model_ema")
MAX_DEPTH = 8  # of entries in entries; a cyclic file has no end
WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel and averaged models; torch.compile
BACKBONE = "backbone."
PREPROCESSOR = "data_preprocessor"  # constants of the config, not weights


class Source(NamedTuple):
    """State dict of a checkpoint, and where in the file it was."""

    state: dict[str, Tensor]  # without wrappers' prefixes
    origin: str  # entry and prefix in words
    others: dict[str, Tensor]  # outside the prefix, by their full key


def find_state(
    checkpoint: Mapping, *, entry: str | None = None, prefix: str | None = None
) -> Source:
    """Find a state dict in a checkpoint.

    Args:
        checkpoint: a state dict, or a mapping with one under an entry of `ENTRIES`.
        entry: take the state dict under this entry, whatever its name.
        prefix: take the keys below this prefix; an empty one takes all; by default those below
            `backbone.` if there are any, else all.

    Raises:
        InputError: there is no state dict, or nothing below the prefix.
    """
    content, entries = select_entry(checkpoint, entry)
    state, wrappers = unwrap(strip_prefix(content, ""))
    for key in [key for key in state if key.startswith(PREPROCESSOR)]:
        del state[key]
    if prefix is None:
        prefix = BACKBONE if any(key.startswith(BACKBONE) for key in state) else ""
    elif prefix:
        prefix = prefix.removesuffix(".") + "."
    words = [f"entry {'.'.join(entries)}"] if entries else ["bare state dict"]
    words += [f"not {name}" for name in known_entries(checkpoint) if name not in entries]
    words += [f"prefix {each}" for each in (*wrappers, prefix) if each]
    inside = strip_prefix(state, prefix)
    if not inside:
        keys = preview(state or content)
        raise InputError(f"no weights found below prefix={prefix!r}; the keys are {keys}")
    others = {key: value for key, value in state.items() if not key.startswith(prefix)}
    return Source(inside, ", ".join(words), others)


def select_entry(content: Mapping, entry: str | None) -> tuple[Mapping, list[str]]:
    """Step into the entries around a state dict; return it and the entries' names."""
    if entry and not isinstance(content.get(entry), Mapping):
        raise InputError(f"no entry {entry!r} with weights; the entries are {preview(content)}")
    names = [entry] if entry else known_entries(content)
    entries = []
    while names and len(entries) < MAX_DEPTH:
        content = content[names[0]]
        entries.append(names[0])
        names = known_entries(content)
    return content, entries


def known_entries(content: Mapping) -> list[str]:
    """Return the entries that may hold a state dict, the preferred first."""
    return [name for name in ENTRIES if isinstance(content.get(name), Mapping)]


def unwrap(state: OrderedDict[str, Tensor]) -> tuple[OrderedDict[str, Tensor], list[str]]:
    """Return a state dict without wrappers' prefixes, and these prefixes, the outermost first.

    What lies beside a wrapper's keys are its own counters, which are left out. Raises InputError if
    a key is there with and without a prefix.
    """
    for wrapper in WRAPPERS:
        if any(key.startswith(wrapper) for key in state):
            inside, wrappers = unwrap(strip_prefix(state, wrapper))
            wrappers = [wrapper, *wrappers]
            if (twice := next((key for key in inside if key in state), None)) is not None:
                raise two_tensors(twice, twice, "".join([*wrappers, twice]))
            return inside, wrappers
    return state, []


def strip_prefix(state: Mapping, prefix: str) -> OrderedDict[str, Tensor]:
    """Return the tensors below a prefix without it, and torch's metadata of the modules there."""
    inside = OrderedDict()
    for key, value in state.items():
        if isinstance(value, Tensor) and str(key).startswith(prefix):
            inside[str(key).removeprefix(prefix)] = value
    inside._metadata = OrderedDict()
    modules = getattr(state, "_metadata", None)
    for path, metadata in modules.items() if isinstance(modules, Mapping) else ():
        if f"{path}.".startswith(prefix) and isinstance(metadata, Mapping):
            inside._metadata[f"{path}.".removeprefix(prefix).removesuffix(".")] = metadata
    return inside


def rename_keys(state: Mapping[str, Tensor], rename: Callable[[str], str]) -> dict[str, Tensor]:
    """Return a state dict with renamed keys; InputError if two keys get one name."""
    renamed = {}
    origins = {}
    for key, tensor in state.items():
        name = rename(key)
        if name in renamed:
            raise two_tensors(name, origins[name], key)
        renamed[name] = tensor
        origins[name] = key
    return renamed


def two_tensors(name: str, *keys: str) -> InputError:
    """Return the error for keys of a file that mean one tensor of the model."""
    found = f"two tensors for {preview([name])}: {preview(keys)}"
    return InputError(f"{found}; save the file again with one of them")


def preview(keys: Iterable, count: int = 3) -> str:
    """Return the first keys, and how many there are; line breaks and the like are escaped."""
    keys = [str(key) if str(key).isprintable() else repr(str(key)) for key in keys]
    shown = ", ".join(keys[:count]) or "none"
    return shown if len(keys) <= count else f"{shown}, ... ({len(keys)} in all)"
