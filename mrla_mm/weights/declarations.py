"""What strict loading asks of a backbone: all that one may declare about its weight files."""

from mrla_mm.weights.layouts import LAYOUTS, KeyLayout


class WeightDeclarations:
    """Base of the backbones that declare something; the defaults are those of any other model."""

    key_layout: str | None = None  # name in `LAYOUTS`; None if files use this model's names
    optional_parts: tuple[str, ...] = ()  # prefixes of keys that a file may lack
    unbuilt_parts: tuple[str, ...] = ()  # prefixes of a file's keys for layers that are left out

    def published_layout(self) -> KeyLayout:
        """Return the layout of published files, here that of `key_layout`."""
        return LAYOUTS[self.key_layout]


def declarations_of(module: object) -> WeightDeclarations:
    """Return what a module declares, the defaults for a whole model or another's backbone."""
    return module if isinstance(module, WeightDeclarations) else WeightDeclarations()
