"""Runs of blocks in any backbone, found by a forward pass over images of zeros.

A run is two or more consecutive blocks of one class in one container, which may share a memory.
Each is called once, on the output of the block before it; all but the first keep its shape.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from mmengine.utils import to_2tuple
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mrla_mm.errors import InputError

IMAGE_SIZES = (128, 224, 256, 384)  # of images, where a backbone does not say which it takes
MAX_EXTRA_TOKENS = 2  # class and distillation, before the patches
Size = tuple[int, int]  # rows and columns, of an image or of a grid


class Call(NamedTuple):
    """A call of a module that takes a tensor first and returns one."""

    image: Size
    caller: str  # name of the module in whose forward it happens
    input_shape: torch.Size
    output_shape: torch.Size
    producers: set[str]  # names of the modules that returned exactly this input tensor
    grid: Size | None  # of the tokens that the module returns
    overwrites_input: bool


class Block(NamedTuple):
    """A module that returns maps of the image, or tokens whose grid is an argument of its call."""

    name: str  # in the backbone
    module: nn.Module
    layout: str  # "maps" (B, C, H, W), "maps, channels last" (B, H, W, C), or "tokens"
    channels: int  # C of what it returns
    extra_tokens: int  # E class tokens before the patches of tokens (B, E + H W, C)
    keeps_shape: bool  # whether it returns the shape that it takes
    producers: set[str]  # names of the modules that returned what it takes
    caller: str  # name of the module that calls it: its container or, of a ModuleList, one above

    def follows(self, other: "Block") -> bool:
        """Whether it may come after another block in a run."""
        is_next = other.name in self.producers
        return is_next and self.keeps_shape and type(self.module) is type(other.module)


class Run(NamedTuple):
    """Consecutive blocks of a container."""

    name: str  # the container's in the backbone; of the backbone's own children the first block's
    blocks: Sequence[Block]


def find_runs(backbone: nn.Module, in_channels: int = 3, size: Size | None = None) -> list[Run]:
    """Find the runs of a backbone, of nested ones the outermost.

    `size` is the height and width of images that it takes; by default some are tried. Raises
    InputError if the backbone fails with all of them.
    """
    calls = probe_calls(backbone, in_channels, size)
    found = [as_block(name, backbone.get_submodule(name), calls[name]) for name in calls]
    blocks = {block.module: block for block in found if block}
    blocks = {module: block for module, block in blocks.items() if not is_stage(module, blocks)}
    runs = []
    for name, container in backbone.named_modules():
        for members in group_blocks(container, blocks):
            runs.append(Run(name or members[0].name, members))
            for block in members:
                for module in block.module.modules():
                    blocks.pop(module, None)  # a block is in one run, and none is inside another
    return runs


def is_stage(module: nn.Module, blocks: dict[nn.Module, Block]) -> bool:
    """Whether a module is an nn.Sequential with a run inside, and so not a block."""
    if not isinstance(module, nn.Sequential):
        return False
    return any(group_blocks(part, blocks) for part in module.modules())


def group_blocks(container: nn.Module, blocks: dict[nn.Module, Block]) -> list[list[Block]]:
    """Return the runs among the children of a container, each as a list of its blocks."""
    groups = []
    previous = None
    for module in container.children():
        block = blocks.get(module)
        if block and not isinstance(container, nn.Sequential) and is_layer(module):
            block = None  # such as mmcv's ConvModules inside a block, which form no run
        if block and previous and block.follows(previous):
            groups[-1].append(block)
        elif block:
            groups.append([block])
        previous = block
    return [group for group in groups if len(group) > 1]


def as_block(name: str, module: nn.Module, calls: Sequence[Call]) -> Block | None:
    """Return a module as a block, or None.

    A block has children, and a forward that is and stays its class's: timm's method `fuse` would
    replace it, and timm's checkpointing calls the children of an nn.Sequential one by one. It is
    called once and does not overwrite its input, as ReLU(inplace=True) does: the branch could not
    take it.
    """
    has_fuse = hasattr(type(module), "fuse")
    is_replaced = "forward" in vars(module) or has_fuse or isinstance(module, nn.Sequential)
    is_called_once = len(calls) == len({call.image for call in calls})
    overwrites_input = any(call.overwrites_input for call in calls)
    is_block = module._modules and is_called_once and not (is_replaced or overwrites_input)
    layout = layout_of(calls) if is_block else None
    if layout is None:
        return None
    first = calls[0]
    return Block(
        name=name,
        module=module,
        layout=layout,
        channels=first.output_shape[1 if layout == "maps" else -1],
        extra_tokens=first.output_shape[1] - prod(first.grid) if layout == "tokens" else 0,
        keeps_shape=all(call.input_shape == call.output_shape for call in calls),
        producers=set.intersection(*(call.producers for call in calls)),
        caller=first.caller,
    )


def layout_of(calls: Sequence[Call]) -> str | None:
    """Return the layout of what a module returns, as `Block` names it; None for no maps."""
    rank = len(calls[0].output_shape)
    if rank == 3 and all(call.grid and has_aspect_ratio(call.grid, call.image) for call in calls):
        return "tokens"
    if rank == 4:
        channels_first = all(has_aspect_ratio(call.output_shape[2:], call.image) for call in calls)
        channels_last = all(has_aspect_ratio(call.output_shape[1:3], call.image) for call in calls)
        if channels_first != channels_last:
            return "maps" if channels_first else "maps, channels last"
    return None


def is_layer(module: nn.Module) -> bool:
    """Whether a module has the weights of one layer, as a convolution with its norm."""
    return sum(parameter.dim() > 1 for parameter in module.parameters()) < 2


def has_aspect_ratio(grid: Size, image: Size) -> bool:
    """Whether a grid has the aspect ratio of an image, up to the rounding of its sides."""
    return abs(grid[0] * image[1] - grid[1] * image[0]) <= sum(image)


def find_grid(tokens: Tensor, arguments: Sequence[object]) -> Size | None:
    """Return the grid (H, W) of tokens (B, E + H W, C) that is among the arguments of a call."""
    pairs = [each for each in arguments if isinstance(each, tuple | list) and len(each) == 2]
    pairs += zip(arguments, arguments[1:], strict=False)  # H and W each an argument of its own
    is_traced = isinstance(tokens, fx.Proxy)  # whose shape has no numbers yet
    for pair in pairs:
        if not all(map(is_dimension, pair)):
            continue
        if is_traced or 0 <= tokens.shape[1] - prod(pair) <= MAX_EXTRA_TOKENS:
            return tuple(pair)
    return None


def is_dimension(value: object) -> bool:
    """Whether a value may be H or W: a number, or what torch's tracers have in its place."""
    is_number = isinstance(value, int | torch.SymInt | fx.Proxy)
    return is_number or getattr(value, "ndim", None) == 0


def probe_calls(backbone: nn.Module, in_channels: int, size: Size | None) -> dict:
    """Return a list of calls for each module of a backbone, by name, on images that it takes."""
    zeros = next(backbone.parameters()).new_zeros
    failure = None
    for images in images_to_try(backbone, size):
        calls = defaultdict(list)
        try:
            for image in images:
                for name, call in record_calls(backbone, zeros(1, in_channels, *image)):
                    calls[name].append(call)
            return calls
        except Exception as error:
            failure = error
    raise InputError(
        f"{type(backbone).__name__} does not run on images of zeros ({type(failure).__name__}: "
        f"{failure}); name a height and width that it takes, as probe_size=(224, 224)"
    ) from failure


def images_to_try(backbone: nn.Module, size: Size | None) -> list[list[Size]]:
    """Return sizes of images: rectangles both ways, and squares for what takes no rectangle."""
    if size is None:
        size = next((m.img_size for m in backbone.modules() if hasattr(m, "img_size")), None)
    given = [to_2tuple(size)] if size is not None else [(side, side) for side in IMAGE_SIZES]
    rectangles = [[(rows, 2 * columns), (2 * rows, columns)] for rows, columns in given]
    return rectangles + [[each] for each in given]


def record_calls(backbone: nn.Module, image: Tensor) -> list[tuple[str, Call]]:
    """Run a copy of a backbone on an image; return the calls of its modules and their names."""
    probe = copy.deepcopy(backbone)
    nn.Module.train(probe, False)  # a host's own train would also freeze stages
    names = {module: name for name, module in probe.named_modules()}
    calls = []
    producers = WeakTensorKeyDictionary()  # names of the modules that returned a tensor
    running = [("", None)]  # names of modules that run, innermost last, and versions of inputs

    def before(module: nn.Module, args: tuple) -> None:
        version = args[0]._version if args and isinstance(args[0], Tensor) else None
        running.append((names[module], version))

    def after(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        name, version = running.pop()
        if not (args and isinstance(args[0], Tensor) and isinstance(output, Tensor)):
            return
        x, *others = args
        call = Call(
            image=tuple(image.shape[2:]),
            caller=running[-1][0],
            input_shape=x.shape,
            output_shape=output.shape,
            producers={*producers.get(x, ())},
            grid=find_grid(output, (*others, *kwargs.values())) if output.dim() == 3 else None,
            overwrites_input=x._version != version,
        )
        calls.append((name, call))
        producers.setdefault(output, []).append(name)

    for module in names:
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, with_kwargs=True)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        probe(image)
    return calls
