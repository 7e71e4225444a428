"""Unknown keys and types anywhere in a finished config: compared with the signature of what will be built from it."""

import difflib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from mmengine import registry
from mmengine.config import Config
from mmengine.optim import OptimWrapper
from mmengine.registry import Registry
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, LogProcessor, TestLoop, ValLoop
from mmengine.runner.utils import set_random_seed
from torch.utils.data import DataLoader

from mrla_mm.arguments import instead, nearest
from mrla_mm.config.inherited import gather_left_over
from mrla_mm.config.names import is_registered, near_ours
from mrla_mm.config.signatures import accepted, from_host, is_ours
from mrla_mm.errors import InputError

REPORTED = 5  # faults that one message names
MISSPELT = 0.85  # likeness to a known key that makes a key of a part which its owner may take apart a misspelt one
SEVERAL = (Mapping, list, tuple)  # schedulers of one of several optimizers
LOADER_KEYS = accepted(DataLoader).names | {"num_batch_per_epoch", "disable_subprocess_warning"}
PHASES = ("train", "val", "test", "tta")  # what a run may build; the last is test-time augmentation
AUTO_SCALE_LR = {"enable", "base_batch_size"}
READ_BY_NAME = {
    "env_cfg": {"cudnn_benchmark", "mp_cfg", "dist_cfg", "resource_limit"},
    "randomness": accepted(set_random_seed).names,
}


class Place(NamedTuple):
    """What is built at a place of a config.

    Fields:
        registries: where its `type` is looked up, in this order.
        extras: keys that are taken out before it is built.
        default: class that is built without a `type`; None where the type is needed.
        certain: whether what is there goes to these registries as it is, so that an unknown type or key is an error;
            other parts are built by their owner, which may take keys out before: mmdet's DETR does with a loss.
        inside: places of the keys below it; other keys are of this place too, but less certainly.
    """

    registries: tuple[Registry, ...]
    extras: frozenset[str] = frozenset()
    default: Callable | None = None
    certain: bool = True
    inside: Mapping[str, "Place | None"] = {}


# What hosts take apart themselves, by rules of their own, is at no place.
OPAQUE = dict.fromkeys(("norm_cfg", "conv_cfg", "act_cfg", "upsample_cfg", "dcn", "metainfo", "nms", "mask_cfg"))
INIT = Place((registry.WEIGHT_INITIALIZERS,), frozenset({"override"}), certain=False)
MODEL = Place((registry.MODELS, registry.TASK_UTILS), inside={**OPAQUE, "init_cfg": INIT})
COMPONENTS = {  # parts that the model builds from their configs as they are
    "model": ("backbone", "neck", "roi_head", "rpn_head", "bbox_head", "mask_head", "head"),
    "model.roi_head": ("bbox_head", "mask_head"),
}
TRANSFORM = Place((registry.TRANSFORMS,))
DATASET = Place((registry.DATASETS,), inside={**OPAQUE, "pipeline": TRANSFORM})
FUNCTION = Place((registry.FUNCTIONS,))
SAMPLER = Place((registry.DATA_SAMPLERS,))
LOADER = {
    "dataset": DATASET,
    "sampler": SAMPLER,
    "batch_sampler": SAMPLER,
    "collate_fn": FUNCTION,
    "worker_init_fn": FUNCTION,
}
METRIC = Place((registry.METRICS,))
EVALUATOR = Place((registry.EVALUATOR,), inside={"metrics": METRIC})
HOOK = Place((registry.HOOKS,), frozenset({"priority"}))
OPTIMIZERS = Place(
    (registry.OPTIM_WRAPPERS,),
    frozenset({"constructor", "paramwise_cfg"}),
    OptimWrapper,
    inside={"optimizer": Place((registry.OPTIMIZERS,)), "paramwise_cfg": None, "clip_grad": None, "loss_scale": None},
)
CONSTRUCTORS = Place((registry.OPTIM_WRAPPER_CONSTRUCTORS,))
SCHEDULERS = Place((registry.PARAM_SCHEDULERS,), frozenset({"convert_to_iter_based", "epoch_length"}))
BACKENDS = Place((registry.VISBACKENDS,), frozenset({"name"}))
LOOPS = {"val": ValLoop, "test": TestLoop}
PLACES = {
    "model": MODEL,
    "data_preprocessor": MODEL._replace(certain=False),
    "custom_hooks": HOOK,
    "visualizer": Place((registry.VISUALIZERS,), inside={"vis_backends": BACKENDS}),
    "log_processor": Place((registry.LOG_PROCESSORS,), default=LogProcessor),
}


def check_keys(cfg: Config, phases: Collection[str] = PHASES) -> None:
    """Refuse keys and types of a finished config that nothing takes, at any depth, where the phases of a run read it.

    Keys are compared with the arguments of the class, function or loop that is built from them. Nothing is said where
    these are not known: below a class of the user's own, and of one that does as it likes with its `**kwargs`; of such
    classes of the hosts, keys that are but a slip away from an argument are named. What only another phase builds is
    left out, as mmengine does: an optimizer's package need not be where a model is tested.

    Args:
        cfg: the config.
        phases: those of `PHASES` that will run.

    Raises:
        InputError: names the keys with their places, and for each the nearest one that exists.
    """
    faults = []
    if cfg.get("default_scope") is not None:  # a package may add to mmengine's own what a look-up here would not see
        with registry.MODELS.switch_scope_and_registry(cfg.default_scope):
            faults = [fault for phase in PHASES if phase in phases for fault in PHASE_FAULTS[phase](cfg)]
            faults += faults_of_all_runs(cfg)
    faults += [
        fault for fault in near_ours(of_run(cfg, phases)) if not any(fault.split("=")[0] in known for known in faults)
    ]
    if faults := gather_left_over(cfg, faults):
        more = f"; and {len(faults) - REPORTED} more" if len(faults) > REPORTED else ""
        raise InputError("; ".join(faults[:REPORTED]) + more)


def training_faults(cfg: Mapping) -> Iterator[str]:
    """Yield what is wrong with the keys of what only a training builds."""
    yield from loader_faults(cfg, "train")
    if isinstance(cfg.get("auto_scale_lr"), Mapping):
        yield from unknown(cfg["auto_scale_lr"], "auto_scale_lr", AUTO_SCALE_LR, "auto_scale_lr")
    yield from walk(cfg.get("train_cfg"), "train_cfg", train_loop(cfg.get("train_cfg")))
    wrapper, schedulers = cfg.get("optim_wrapper"), cfg.get("param_scheduler")
    constructor = wrapper.get("constructor") if isinstance(wrapper, Mapping) else None
    if constructor is not None and find(constructor, CONSTRUCTORS) is None:
        yield missing_type(dict(type=constructor), "optim_wrapper", CONSTRUCTORS, key="constructor")
    if constructor is None or from_host(find(constructor, CONSTRUCTORS)):
        yield from walk(wrapper, "optim_wrapper", OPTIMIZERS)
    of_several = isinstance(schedulers, Mapping) and all(isinstance(each, SEVERAL) for each in schedulers.values())
    parts = {f".{name}": each for name, each in schedulers.items()} if of_several else {"": schedulers}
    for name, each in parts.items():
        yield from walk(each, f"param_scheduler{name}", SCHEDULERS)


def of_run(cfg: Mapping, phases: Collection[str]) -> dict[str, object]:
    """Return the sections of a config that some phase of a run may read: not those named for the other phases."""
    others = tuple(f"{phase}_" for phase in PHASES if phase not in phases)
    if "train" not in phases:
        others += ("optim_wrapper", "param_scheduler", "auto_scale_lr")
    return {key: value for key, value in cfg.items() if not key.startswith(others)}


def loader_faults(cfg: Mapping, phase: str) -> Iterator[str]:
    """Yield what is wrong with the keys of a data loader."""
    loader = cfg.get(f"{phase}_dataloader")
    if isinstance(loader, Mapping):
        yield from unknown(loader, f"{phase}_dataloader", LOADER_KEYS, "DataLoader")
        for key, place in LOADER.items():
            yield from walk(loader.get(key), f"{phase}_dataloader.{key}", place)


def evaluation_faults(cfg: Mapping, phase: str) -> Iterator[str]:
    """Yield what is wrong with the keys of what only a validation, or only a test, builds."""
    yield from loader_faults(cfg, phase)
    evaluator = cfg.get(f"{phase}_evaluator")
    typed = evaluator.get("type") if isinstance(evaluator, Mapping) and "metrics" in evaluator else None
    whole = typed is not None and find(typed, EVALUATOR) is not None
    yield from walk(evaluator, f"{phase}_evaluator", EVALUATOR if whole else METRIC)
    yield from walk(cfg.get(f"{phase}_cfg"), f"{phase}_cfg", Place((registry.LOOPS,), default=LOOPS[phase]))


def augmentation_faults(cfg: Mapping) -> Iterator[str]:
    """Yield what is wrong with the keys of what only test-time augmentation builds."""
    yield from walk(cfg.get("tta_model"), "tta_model", MODEL)
    yield from walk(cfg.get("tta_pipeline"), "tta_pipeline", TRANSFORM)


PHASE_FAULTS = {
    "train": training_faults,
    "val": functools.partial(evaluation_faults, phase="val"),
    "test": functools.partial(evaluation_faults, phase="test"),
    "tta": augmentation_faults,
}


def faults_of_all_runs(cfg: Mapping) -> Iterator[str]:
    """Yield what is wrong with the keys of what every run builds."""
    for key, known in READ_BY_NAME.items():
        if isinstance(cfg.get(key), Mapping):
            yield from unknown(cfg[key], key, known, key)
    for key, place in PLACES.items():
        yield from walk(cfg.get(key), key, place)
    hooks = {name: hook for name, hook in (cfg.get("default_hooks") or {}).items() if hook is not None}
    untyped = [name for name, hook in hooks.items() if isinstance(hook, Mapping) and "type" not in hook]
    for name in untyped:
        yield f"default_hooks.{name} has no type{nearest(name, set(hooks) - set(untyped))}"
    for name in set(hooks) - set(untyped):
        yield from walk(hooks[name], f"default_hooks.{name}", HOOK)


def train_loop(train_cfg: object) -> Place:
    """Return the place of the training loop, which a flag may choose instead of a type."""
    by_epoch = isinstance(train_cfg, Mapping) and train_cfg.get("by_epoch", True)
    return Place((registry.LOOPS,), frozenset({"by_epoch"}), EpochBasedTrainLoop if by_epoch else IterBasedTrainLoop)


def walk(node: object, path: str, place: Place | None) -> Iterator[str]:
    """Yield what is wrong with the keys and types of a part of a config."""
    if place is None:
        return
    if isinstance(node, list | tuple):
        for index, item in enumerate(node):
            yield from walk(item, f"{path}.{index}", place)
    if not isinstance(node, Mapping) or not (node or place.default):
        return
    with place.registries[0].switch_scope_and_registry(node.get("_scope_")):
        kind = find(node.get("type"), place) if "type" in node else place.default
        if kind is None and (place.certain or is_misspelt(node.get("type"), place)):
            yield missing_type(node, path, place)
        if kind is not None:
            (known, others), ours = accepted(kind), from_host(kind)
            if ours or not others:
                near_only = others or not place.certain
                hint = instead if is_ours(kind) else nearest
                yield from unknown(node, path, known | place.extras, kind.__name__, near_only=near_only, hint=hint)
            if not ours:
                return
        for key, value in node.items():
            yield from walk(value, f"{path}.{key}", inner(place, key, path))


def inner(place: Place, key: str, path: str) -> Place | None:
    """Return the place of what a key holds, in the part of the config at a path."""
    if key in place.inside:
        found = place.inside[key]
        return found and found._replace(inside={**place.inside, **found.inside})
    certain = key in COMPONENTS.get(path, ())
    return place._replace(certain=certain, default=None, extras=frozenset())


def find(kind: object, place: Place) -> Callable | None:
    """Return the class or function that a `type` means at a place, None if it is not found."""
    if not isinstance(kind, str):
        return kind if callable(kind) else None
    for root in place.registries:
        with root.switch_scope_and_registry(None) as here:
            if (found := here.get(kind)) is not None:
                return found
    return None


def missing_type(node: Mapping, path: str, place: Place, *, key: str = "type") -> str:
    """Return the message for a part of a config whose `type` is not there, or not known."""
    if "type" not in node:
        return f"{path} has no type, so nothing can be built from its {', '.join(map(str, node))}"
    names = {name for root in place.registries for name in registered(root)}
    close = difflib.get_close_matches(str(node["type"]).rpartition(".")[2], names, n=1, cutoff=0.7)
    hint = f"did you mean {close[0]!r}?" if close else "import the module that registers it with custom_imports"
    return f"{path}.{key}={node['type']!r} is not a registered {place.registries[0].name}; {hint}"


def is_misspelt(kind: object, place: Place) -> bool:
    """Whether a `type` that its owner may take apart is nothing but a name of its place, misspelt."""
    names = (name for root in place.registries for name in registered(root))
    return (
        isinstance(kind, str)
        and bool(difflib.get_close_matches(kind, names, cutoff=MISSPELT))
        and not is_registered(kind)
    )


def registered(root: Registry) -> Iterator[str]:
    """Yield the names that a registry knows in the scope in use, its parents' included."""
    with root.switch_scope_and_registry(None) as here:
        while here is not None:
            yield from here.module_dict
            here = here.parent


def unknown(
    node: Mapping,
    path: str,
    known: Iterable[str],
    owner: str,
    *,
    near_only: bool = False,
    hint: Callable[[str, Iterable[str]], str] = nearest,
) -> Iterator[str]:
    """Yield a message for each key that is none of the known ones; or only where it is hardly but a misspelt one."""
    for key in node:
        if key in known or key in ("type", "_scope_"):
            continue
        if not near_only or difflib.get_close_matches(str(key), known, cutoff=MISSPELT):
            yield f"{path}.{key}: {owner} has no argument {key!r}{hint(str(key), known)}"
