"""``_base_ = 'mrla_mm::<config>.py'`` in config files, beside the ``package::`` names that mmengine knows itself."""


def install() -> None:
    """Placeholder."""
