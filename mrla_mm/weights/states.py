"""What a checkpoint holds: a state dict in entries and wrappers, and the layer attention it was trained with."""

import ast
import inspect
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from mrla_mm.errors import InputError

# Entries that hold a state dict, the preferred first: a file with a model and its moving average
# gives the model. mmengine swaps the two when it saves, so its `state_dict` is the average already.
ENTRIES = ("state_dict", "model", "ema_state_dict", "state_dict_ema", "model_ema")
WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel and averaged models; torch.compile
BACKBONE = "backbone."
PREPROCESSOR = "data_preprocessor"  # constants of the config, not weights
SILENT = (
    "type",
    "head_channels",
    "value",
    "previous",
)  # what changes layer attention but neither names nor shapes


class Source(NamedTuple):
    """State dict of a checkpoint, and where in the file it was."""

    state: dict[str, Tensor]  # without wrappers' prefixes
    origin: str  # entry and prefix in words
    heads: dict[str, Tensor]  # of the other parts of the model, by their full key


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
    content, entries = enter(checkpoint, entry)
    state, wrappers = unwrap(content)
    words = [f"entry {'.'.join(entries)}"] if entries else ["bare state dict"]
    words += [
        f"not {name}"
        for name in ENTRIES
        if isinstance(checkpoint.get(name), Mapping) and name not in entries
    ]
    words += [f"prefix {wrapper}" for wrapper in wrappers]
    if prefix is None:
        prefix = BACKBONE if any(key.startswith(BACKBONE) for key in state) else ""
    if prefix:
        prefix = prefix.removesuffix(".") + "."
        words.append(f"prefix {prefix}")
    inside = {
        key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)
    }
    if not inside:
        raise InputError(
            f"no weights found below prefix={prefix!r}; the keys are {sample(state or content)}"
        )
    return Source(
        inside,
        ", ".join(words),
        {key: value for key, value in state.items() if not key.startswith(prefix)},
    )


def enter(content: Mapping, entry: str | None) -> tuple[Mapping, list[str]]:
    """Step into the entries around a state dict; return it and the entries' names."""
    entries = []
    while name := entry or next(
        (name for name in ENTRIES if isinstance(content.get(name), Mapping)), None
    ):
        if not isinstance(content.get(name), Mapping):
            raise InputError(
                f"there is no entry {name!r} with weights; the entries are {sample(content)}"
            )
        content, entry = content[name], None
        entries.append(name)
    return content, entries


def unwrap(content: Mapping) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a state dict without wrappers' prefixes, and these prefixes.

    What lies beside a wrapper's keys are its own counters; they and the data preprocessor's
    constants are left out.
    """
    state = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    wrappers = []
    while wrapper := next((w for w in WRAPPERS if any(key.startswith(w) for key in state)), None):
        state = {
            key.removeprefix(wrapper): value
            for key, value in state.items()
            if key.startswith(wrapper)
        }
        wrappers.append(wrapper)
    return {
        key: value for key, value in state.items() if not key.startswith(PREPROCESSOR)
    }, wrappers


def sample(keys: Mapping | list, count: int = 3) -> str:
    """Return the first keys, and how many there are."""
    keys = [str(key) for key in keys]
    shown = ", ".join(keys[:count]) or "none"
    return shown if len(keys) <= count else f"{shown}, ... ({len(keys)} in all)"


def by_part(keys: Mapping | list) -> str:
    """Return the top-level names of keys and how many tensors each has."""
    counts = Counter(key.partition(".")[0] for key in keys)
    return ", ".join(f"{part} ({count})" for part, count in counts.items())


def trained_attention(checkpoint: Mapping) -> dict | None:
    """Return the config of layer attention in a checkpoint's metadata, or None.

    mmengine's training checkpoints hold the text of their config, which is parsed and never
    executed.
    """
    meta = checkpoint.get("meta")
    if not isinstance(meta, Mapping):
        return None
    if isinstance(meta.get("layer_attention"), Mapping):
        return dict(meta["layer_attention"])
    return attention_in(meta["cfg"]) if isinstance(meta.get("cfg"), str) else None


def attention_in(text: str) -> dict | None:
    """Return the one `layer_attention=dict(...)` of a config's text; None if there is none, or more than one."""
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.keyword)]
        calls = [
            node.value
            for node in nodes
            if node.arg == "layer_attention" and isinstance(node.value, ast.Call)
        ]
        configs = [
            {item.arg: ast.literal_eval(item.value) for item in call.keywords if item.arg}
            for call in calls
        ]
    except (SyntaxError, ValueError, RecursionError):
        return None
    return configs[0] if configs and all(config == configs[0] for config in configs) else None


def compare_attention(backbone: nn.Module | None, trained: Mapping | None) -> list[str]:
    """Return in words how the layer attention of a backbone differs from the one a file was trained with."""
    model = getattr(backbone, "layer_attention", None)
    if not model or not trained:
        return []
    defaults = attention_defaults(backbone)
    pairs = {
        key: [config.get(key, defaults.get(key)) for config in (model, trained)] for key in SILENT
    }
    pairs["type"] = [type_name(kind) for kind in pairs["type"]]
    return [
        f"the file was trained with layer_attention {key}={theirs!r}, the model has {ours!r}"
        for key, (ours, theirs) in pairs.items()
        if None not in (ours, theirs) and ours != theirs
    ]


def attention_defaults(backbone: nn.Module) -> dict[str, object]:
    """Return what a backbone's layer attention takes where its config says nothing."""
    attention = next(
        (part for name, part in backbone.named_modules() if name.endswith("mrla.attention")), None
    )
    if attention is None:
        return {}
    kinds = reversed(type(attention).__mro__)
    parameters = [
        each for kind in kinds for each in inspect.signature(kind.__init__).parameters.values()
    ]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    on_tokens = backbone.key_layout in ("deit", "pvtv2")
    return {**defaults, **(getattr(attention, "token_defaults", {}) if on_tokens else {})}


def type_name(kind: type | str) -> str:
    """Return the bare name of a type in a config: of a class, or of a name with a scope or module."""
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
