"""Arguments that every transformer of one resolution takes: what they must be, and what they mean."""

from collections.abc import Sequence
from itertools import accumulate

from mrla_mm.arguments import (
    CONFIG,
    DICT,
    FLAG,
    INIT,
    NUMBER,
    PIXELS,
    RATE,
    Rule,
    check_arguments,
    is_list,
    is_whole,
    one_of,
    whole,
)
from mrla_mm.errors import InputError

RULES = dict(
    with_dist_token=FLAG,
    with_cp=FLAG,
    img_size=PIXELS,
    patch_size=PIXELS,
    in_channels=whole(1),
    drop_rate=RATE,
    drop_path_rate=RATE,
    qkv_bias=FLAG,
    norm_cfg=CONFIG,
    final_norm=FLAG,
    out_type=one_of("featmap", "cls_token", "avg_featmap", "raw"),
    with_cls_token=FLAG,
    interpolate_mode=one_of("bicubic", "bilinear"),
    layer_scale_init_value=NUMBER,
    patch_cfg=DICT,
    layer_cfgs=Rule("a dict, or a list of one for each block", lambda value: DICT.holds(value) or is_list(value)),
    pre_norm=FLAG,
    init_cfg=INIT,
)


def stage_starts(stage_blocks: int | Sequence[int], depth: int) -> frozenset[int]:
    """Indices of the blocks that start a stage.

    Args:
        stage_blocks: blocks in a stage, the last may have fewer; or the number of blocks of each stage.
        depth: number of blocks of the model.

    Raises:
        InputError: if a stage would be empty or the stages do not add up to the depth.
    """
    if is_whole(stage_blocks, 1):
        return frozenset(range(0, depth, stage_blocks))
    lengths = list(stage_blocks) if is_list(stage_blocks) else []
    if not all(is_whole(length, 1) for length in lengths) or sum(lengths) != depth:
        raise InputError(
            f"stage_blocks={stage_blocks!r} must be a whole number of at least 1, or a list of them that add up to the "
            f"model's {depth} blocks"
        )
    return frozenset(accumulate([0, *lengths[:-1]]))


def check_arch(arch: str | dict, known: dict[str, dict]) -> dict:
    """Return the settings of an architecture, a known name or the settings themselves.

    Raises:
        InputError: if the name is unknown or the settings cannot work.
    """
    if isinstance(arch, str):
        if arch.lower() not in known:
            raise InputError(f"arch={arch!r} is unknown; use one of {', '.join(sorted(known))}, or a dict of settings")
        return known[arch.lower()]
    keys = ("embed_dims", "num_layers", "num_heads", "feedforward_channels")
    if not DICT.holds(arch) or set(arch) != set(keys):
        raise InputError(f"arch={arch!r} must be a name or a dict with {', '.join(keys)}, and nothing else")
    check_arguments(arch, dict.fromkeys(keys, whole(1)))
    if arch["embed_dims"] % arch["num_heads"]:
        raise InputError(f"arch: embed_dims={arch['embed_dims']} is no multiple of num_heads={arch['num_heads']}")
    return arch


def check_out_indices(out_indices: int | Sequence[int], depth: int) -> list[int]:
    """Return block indices counted from the front, in the order of the blocks, in which the model puts them out.

    Raises:
        InputError: if there is no such block, or the order is another.
    """
    given = list(out_indices) if is_list(out_indices) else [out_indices]
    found = [index + depth if is_whole(index, -depth, -1) else index for index in given]
    if not found or not all(is_whole(index, 0, depth - 1) for index in found) or found != sorted(set(found)):
        raise InputError(f"out_indices={out_indices!r} must be ascending indices of the model's {depth} blocks")
    return found
