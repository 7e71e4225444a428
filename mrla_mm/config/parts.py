"""Parts of a config that are of this package, built on trial before a run: what they refuse is named with its place."""

import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS, Registry

from mrla_mm.arguments import class_of, instead, keywords_of, placed
from mrla_mm.config.inherited import gather_left_over
from mrla_mm.config.signatures import is_ours
from mrla_mm.errors import InputError


def check_parts(cfg: Config, phases: Collection[str]) -> None:
    """Build each backbone, neck and optimizer constructor of this package as the run will, and drop it again.

    Their arguments depend on each other and on the channels of a stage, which they alone know. It takes less than a
    second, and leaves the random numbers of the process as they were. Parts inside other models are left to the run.

    Args:
        cfg: the config.
        phases: those of `keys.PHASES` that will run; only a training builds an optimizer.

    Raises:
        InputError: with the place in the config before what the part says.
    """
    model = cfg.get("model")
    for path, part in model_parts(model) if isinstance(model, Mapping) else ():
        build(part, path, MODELS, cfg)
        if "train" in phases:
            check_folding(part, path, cfg)
    wrapper = cfg.get("optim_wrapper")
    if "train" in phases and isinstance(wrapper, Mapping) and wrapper.get("constructor"):
        own = {key: value for key, value in wrapper.items() if key not in ("constructor", "paramwise_cfg")}
        part = dict(type=wrapper["constructor"], optim_wrapper_cfg=own, paramwise_cfg=wrapper.get("paramwise_cfg"))
        build(part, "optim_wrapper", OPTIM_WRAPPER_CONSTRUCTORS, cfg)


def model_parts(model: Mapping) -> Iterator[tuple[str, Mapping]]:
    """Yield the backbone and the necks of a model's config, which models build as they are, with their places."""
    for key in ("backbone", "neck"):
        several = isinstance(model.get(key), list | tuple)
        for index, part in enumerate(model[key] if several else [model.get(key)]):
            if isinstance(part, Mapping) and "type" in part:
                yield f"model.{key}" + (f".{index}" if several else ""), part


def build(part: Mapping, path: str, registry: Registry, cfg: Config) -> None:
    """Build a part if it is one of this package's."""
    scope = cfg.get("default_scope")
    kind = class_of(part, scope, registry)
    if not isinstance(kind, type) or not is_ours(kind):
        return
    if faults := gather_left_over(cfg, list(argument_faults(kind, part, path))):
        raise InputError("; ".join(faults))
    with (
        registry.switch_scope_and_registry(part.get("_scope_") or scope) as here,
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the run's own building gives them
        try:
            here.build(dict(part))
        except InputError as error:
            raise InputError(placed(path, str(error), keywords_of(kind) | {"optimizer"})) from error


def check_folding(part: Mapping, path: str, cfg: Config) -> None:
    """Refuse to let mmengine fold the norms of a part of this package: it traces the part by torch.fx, which fails."""
    value = cfg.get("efficient_conv_bn_eval")
    names, own = [value] if isinstance(value, str) else value, path.removeprefix("model.")
    if not isinstance(names, list | tuple | None):
        raise InputError(f"efficient_conv_bn_eval={value!r} must be a list of names of modules; or leave it out")
    kind, names = class_of(part, cfg.get("default_scope")), [str(name) for name in names or ()]
    if is_ours(kind) and any(name == own or name.startswith(f"{own}.") for name in names):
        raise InputError(
            f"efficient_conv_bn_eval={value!r}: mmengine cannot trace {kind.__name__}; leave {own!r} out "
            "(MRLAResNet folds its frozen norms by itself)"
        )


def argument_faults(kind: type, part: Mapping, path: str) -> Iterator[str]:
    """Yield a message for each argument that a class does not have, and one for those that it needs and lacks."""
    given, known = part.keys() - {"type", "_scope_"}, keywords_of(kind)
    for name in (name for name in part if name in given - known):
        yield f"{path}: {kind.__name__} has no argument {name!r}{instead(name, known)}"
    needed = [each.name for each in inspect.signature(kind).parameters.values() if each.default is each.empty]
    if lacking := [name for name in needed if name in known - given]:
        yield f"{path}: {kind.__name__} needs {', '.join(lacking)}"
