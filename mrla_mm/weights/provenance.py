"""With which layer attention a checkpoint was trained, where its shapes cannot tell.

Heads of another width, or MLA instead of MRLA-base, have tensors of the same names and shapes and compute something
else. What a checkpoint's metadata says about it is compared with the model.
"""

import ast
from collections.abc import Mapping

from torch import nn

from mrla_mm.arguments import type_name

SILENT = ("type", "head_channels", "value", "previous")  # what changes a variant's computation but not its tensors


def trained_attention(checkpoint: Mapping) -> dict | None:
    """Return the config of layer attention in a checkpoint's metadata, None if there is none.

    mmengine's training checkpoints hold the text of their config, which is parsed and never executed.
    """
    meta = checkpoint.get("meta")
    if not isinstance(meta, Mapping):
        return None
    if isinstance(meta.get("layer_attention"), Mapping):
        return dict(meta["layer_attention"])
    return attention_in(meta["cfg"]) if isinstance(meta.get("cfg"), str) else None


def attention_in(text: str) -> dict | None:
    """Return the one `layer_attention=dict(...)` in the text of a config; None for none, several or other values."""
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.keyword)]
        found = [node.value for node in nodes if node.arg == "layer_attention" and isinstance(node.value, ast.Call)]
        configs = [{item.arg: ast.literal_eval(item.value) for item in call.keywords if item.arg} for call in found]
    except (SyntaxError, ValueError, RecursionError):
        return None
    return configs[0] if configs and all(config == configs[0] for config in configs) else None


def compare_attention(backbone: nn.Module | None, file: Mapping | None) -> list[str]:
    """Return in words what differs between the layer attention of a backbone and of a file, where both are known.

    Where a config says nothing, the default counts that this backbone's layer attention has.
    """
    model = getattr(backbone, "layer_attention", None)
    if not model or not file:
        return []
    defaults = next((d for part in backbone.modules() if (d := getattr(part, "attention_defaults", None))), {})
    differences = []
    for key in SILENT:
        ours, theirs = (config.get(key, defaults.get(key)) for config in (model, file))
        if None in (ours, theirs):
            continue
        if key == "type":
            ours, theirs = type_name(ours), type_name(theirs)
        if ours != theirs:
            differences.append(f"the file was trained with layer_attention {key}={theirs!r}, the model has {ours!r}")
    return differences
