"""The layer attention a checkpoint was trained with, where shapes do not tell.

Heads of another width, or MLA in place of MRLA-base, have tensors of the same names and shapes and compute something
else. What the checkpoint's metadata says is compared with the model.
"""

import ast
import inspect
from collections.abc import Mapping

from torch import nn

SILENT = ("type", "head_channels", "value", "previous")  # what changes the computation but not the tensors


def trained_attention(checkpoint: Mapping) -> dict | None:
    """Return the config of layer attention in a checkpoint's metadata, or None.

    mmengine's training checkpoints hold the text of their config, which is parsed and never executed.
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
        calls = [node.value for node in nodes if node.arg == "layer_attention" and isinstance(node.value, ast.Call)]
        configs = [{item.arg: ast.literal_eval(item.value) for item in call.keywords if item.arg} for call in calls]
    except (SyntaxError, ValueError, RecursionError):
        return None
    return configs[0] if configs and all(config == configs[0] for config in configs) else None


def compare_attention(backbone: nn.Module | None, trained: Mapping | None) -> list[str]:
    """Return in words how the layer attention of a backbone differs from the one a file was trained with."""
    model = getattr(backbone, "layer_attention", None)
    if not model or not trained:
        return []
    defaults = attention_defaults(backbone)
    pairs = {key: [config.get(key, defaults.get(key)) for config in (model, trained)] for key in SILENT}
    pairs["type"] = [type_name(kind) for kind in pairs["type"]]
    return [
        f"the file was trained with layer_attention {key}={theirs!r}, the model has {ours!r}"
        for key, (ours, theirs) in pairs.items()
        if None not in (ours, theirs) and ours != theirs
    ]


def attention_defaults(backbone: nn.Module) -> dict[str, object]:
    """Return what a backbone's layer attention takes where its config says nothing."""
    attention = next((part for name, part in backbone.named_modules() if name.endswith("mrla.attention")), None)
    if attention is None:
        return {}
    kinds = reversed(type(attention).__mro__)
    parameters = [each for kind in kinds for each in inspect.signature(kind.__init__).parameters.values()]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    on_tokens = backbone.key_layout in ("deit", "pvtv2")
    return {**defaults, **(getattr(attention, "token_defaults", {}) if on_tokens else {})}


def type_name(kind: type | str) -> str:
    """Return the bare name of a type in a config: of a class, or of a name with a scope or module."""
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
