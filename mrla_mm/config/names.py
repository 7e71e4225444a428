"""Names of classes in a config: which are registered, and which are meant for one of this package."""

import difflib
from collections.abc import Iterator, Mapping

from mmengine import registry
from mmengine.registry import Registry

from mrla_mm.config.signatures import is_ours

CERTAIN = 0.88  # likeness to a class of ours, where little else is known; EfficientNet is a host's, and less near
SHORTEST = 5  # letters of a name that is near another by more than chance


def near_ours(node: object, path: str = "") -> Iterator[str]:
    """Yield a message for each `type`, wherever it is, that nothing has and that is near a class of this package."""
    if isinstance(node, list | tuple):
        for index, item in enumerate(node):
            yield from near_ours(item, f"{path}{index}.")
    if not isinstance(node, Mapping):
        return
    kind = node.get("type")
    if isinstance(kind, str) and kind[:1].isupper() and len(kind) >= SHORTEST and not is_registered(kind):
        ours = {name.lower(): name for root in roots() for name, each in root.module_dict.items() if is_ours(each)}
        for close in difflib.get_close_matches(kind.lower(), ours, n=1, cutoff=CERTAIN):
            yield f"{path}type={kind!r} is registered nowhere; did you mean {ours[close]!r}?"
    for key, value in node.items():
        yield from near_ours(value, f"{path}{key}.")


def roots() -> list[Registry]:
    """Return mmengine's registries, the roots of those of every package."""
    return [each for each in vars(registry).values() if isinstance(each, Registry)]


def is_registered(kind: str) -> bool:
    """Whether any registry of any package has a name, which may begin with the package's scope."""
    pending, name = roots(), kind.rpartition(".")[2]
    while pending:
        here = pending.pop()
        if name in here.module_dict:
            return True
        pending += here.children.values()
    return False
