"""Top-level keys: those of a config file that nothing reads, and overrides of a config from the command line."""

import difflib
import inspect
import re
import warnings
from collections.abc import Collection, Iterable

from mmengine.config import Config
from mmengine.runner import Runner

from mrla_mm.config.keys import of_run
from mrla_mm.datasets.config_parts import head_sizes, is_below, is_misspelt, is_slip, leaf_places
from mrla_mm.errors import InputError

# Keys a config may carry beside the Runner's own arguments, read by mmengine, by the tools or by hooks.
EXTRA_KEYS = {
    "activation_checkpointing",
    "compile",
    "custom_imports",
    "efficient_conv_bn_eval",
    "find_unused_parameters",
    "model_wrapper_cfg",
    "runner_type",
    "strategy",
    "sync_bn",
    "tta_model",
    "tta_pipeline",
}
RUNNER_KEYS = set(inspect.signature(Runner.__init__).parameters) - {"self", "cfg"}
READABLE = RUNNER_KEYS | EXTRA_KEYS
ABOUT_CLASSES = {"class_names", "classes", "metainfo", "num_classes"}


def check_top_level(cfg: Config, phases: Collection[str]) -> None:
    """Refuse a top-level key that is a misspelt one of those that are read; in its place the base's value would be.

    Any other name may be a variable of the config's own, and so may one that the file uses beside setting it. A saved
    config has such variables without their use. Those are warned of alone that differ by a plural's s (`custom_hook`),
    and, where a file without a base sets the key that they are near to, all (`LOG_LEVEL`).

    Args:
        cfg: the config; keys are judged by its text, so those of a config without a file are not.
        phases: those of `keys.PHASES` that will run.

    Raises:
        InputError: names the key and the one that it probably was meant to be.
    """
    code = uncommented(cfg.text)
    for key in cfg:
        near = [known for known in READABLE if is_near(key, known)] if key not in READABLE else []
        if not near or not of_run(dict.fromkeys(near), phases) or not is_only_set(key, code):
            continue
        said = f"{key}: nothing reads a key of this name in the config; did you mean {near[0]!r}?"
        saved = settings_of(near[0], code) and not settings_of("_base_", code)
        if key.rstrip("s") != near[0].rstrip("s") and not saved:
            raise InputError(said)
        warnings.warn(f"{said} A variable of your own may be called so", stacklevel=2)


def is_near(key: str, known: str) -> bool:
    """Whether a key is another one misspelt; a letter of a short word (`text_cfg`) may only be out of its place."""
    return is_misspelt(key, known) or (is_slip(key, known) and sorted(key) == sorted(known))


def is_only_set(name: str, code: str) -> bool:
    """Whether the text of a config, its bases' included, sets a variable and never uses it."""
    return 0 < len(settings_of(name, code)) == len(re.findall(rf"\b{re.escape(name)}\b", code))


def settings_of(name: str, code: str) -> list[str]:
    """Return the beginnings of lines in which the text of a config sets a variable."""
    return re.findall(rf"""^["'\s]*{re.escape(name)}["']?\s*[:=](?!=)""", code, re.MULTILINE)


def uncommented(text: str) -> str:
    """Return the text of a config without comments, but with what follows a # in a string."""
    return re.sub(r"""("[^"\n]*"|'[^'\n]*')|#.*""", r"\1", text)


def move_data_root(cfg: Config, root: str) -> None:
    """Point every data set and evaluator below the config's `data_root` to another folder.

    A config is plain values once it is read, so overriding its `data_root` variable alone would change nothing.
    """
    old = cfg.get("data_root")
    if not isinstance(old, str) or not old:
        found = "no data_root" if old is None else f"data_root={old!r}, which is no folder"
        raise InputError(f"--cfg-options data_root: the config has {found}; set <phase>_dataloader.dataset.data_root")
    new = str(root).rstrip("/") + "/"

    def moved(value):
        if isinstance(value, dict):
            return type(value)({key: moved(item) for key, item in value.items()})
        if isinstance(value, list | tuple):
            return type(value)(moved(item) for item in value)
        if is_below(value, old):
            return new + value[len(old) :].lstrip("/")
        return value

    cfg.data_root = new
    for key in list(cfg):
        if key.endswith(("_dataloader", "_evaluator")):
            cfg[key] = moved(cfg[key])


def check_option_keys(cfg: Config, options: Iterable[str]) -> None:
    """Refuse overrides whose first component nothing reads, which mmengine would accept and ignore.

    Raises:
        InputError: names the key and the nearest one that exists, or the places where its value belongs.
    """
    for option in options:
        top = option.split(".")[0]
        if top in READABLE:
            continue
        if top.lower() in ABOUT_CLASSES:
            raise InputError(
                f"--cfg-options {option}: nothing reads a key {top!r}; classes are set where they are used: "
                f"{' '.join(places_of_classes(cfg))}"
            )
        if top in cfg:
            raise InputError(
                f"--cfg-options {option}: {top!r} is a variable of the config file whose value is already filled in "
                "where it is used; override that place instead, e.g. train_dataloader.dataset.pipeline.0.key=value"
            )
        close = difflib.get_close_matches(top, READABLE, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"--cfg-options {option}: nothing reads a key {top!r}{hint}")


def places_of_classes(cfg: Config) -> list[str]:
    """Return the overrides that set the classes of a config: names for each data set, their number for each head."""
    loaders = [(f"{phase}_dataloader", cfg.get(f"{phase}_dataloader") or {}) for phase in ("train", "val", "test")]
    datasets = [place for key, each in loaders for place, _ in leaf_places(each.get("dataset") or {}, f"{key}.dataset")]
    names = [f'{place}.metainfo.classes="[NAME,NAME]"' for place in datasets]
    return names + [f"{place}=NUMBER" for place, _ in head_sizes(cfg.get("model") or {})]
