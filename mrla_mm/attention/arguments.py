"""What the configs of backbones may say about layer attention."""

import re
from collections.abc import Mapping

from mrla_mm.errors import InputError

AttentionConfig = Mapping | str | type | bool | None  # of a `layer_attention`; True is refused


def attention_config(layer_attention: AttentionConfig) -> dict | None:
    """Return a variant's config, given it or its name or class alone; None for None or False.

    Raises:
        InputError: it is none of these, or a config without a type.
    """
    if layer_attention is None or layer_attention is False:
        return None
    if isinstance(layer_attention, str | type):
        return dict(type=layer_attention)
    if isinstance(layer_attention, Mapping) and "type" in layer_attention:
        return dict(layer_attention)
    raise InputError(
        f'layer_attention={layer_attention!r} must be a config such as dict(type="MRLALight"), the '
        "name of a variant, or None for a plain backbone"
    )


def stage_pattern(stages: str) -> re.Pattern:
    """Return the regular expression of the stages' names, or raise InputError if it is none."""
    try:
        return re.compile(stages)
    except (re.error, TypeError) as error:
        raise InputError(
            f'stages={stages!r} must be a regular expression such as "layer[34]": {error}'
        ) from error
