"""What makes a backbone load its weights strictly."""


class PretrainedBackbone:
    """Mixin of this package's backbones, first of their bases."""
