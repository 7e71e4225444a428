"""Runs of blocks in any backbone, found by what its modules do with images of zeros.

A run is what may share a memory: two or more consecutive blocks of one class in one container that
return maps of one shape. All but the first keep the shape of what they take; each is called once,
in order.
"""

import copy
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from mmengine.utils import to_2tuple
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mrla_mm.errors import InputError

SIDES = (128, 224, 256, 384)  # of images, where a backbone does not say which it takes
MAX_EXTRA_TOKENS = 2  # class and distillation
Size = tuple[int, int]  # rows and columns, of an image or of a grid


class Call(NamedTuple):
    """A call of a module that takes a tensor first and returns one."""

    image: Size
    input_shape: torch.Size
    output_shape: torch.Size
    producers: tuple[nn.Module, ...]  # modules that returned exactly this input tensor
    grid: Size | None  # of the tokens that it returns
    overwrites_input: bool


class Block(NamedTuple):
    """A module that returns maps of the image, or tokens whose grid is an argument of its call.

    Attributes:
        layout: "maps" (B, C, H, W), "maps, channels last" (B, H, W, C) or "tokens" (B, E + H W, C).
        channels: C of what it returns.
        extra_tokens: E.
        calls: one for each image.
    """

    module: nn.Module
    layout: str
    channels: int
    extra_tokens: int
    calls: tuple[Call, ...]

    @property
    def keeps_shape(self) -> bool:
        """Whether it returns the shape that it takes."""
        return all(call.input_shape == call.output_shape for call in self.calls)

    def follows(self, other: "Block") -> bool:
        """Whether it takes what another block of its class returns, and keeps its shape."""
        is_next = all(other.module in call.producers for call in self.calls)
        return is_next and self.keeps_shape and type(self.module) is type(other.module)


class Run(NamedTuple):
    """Consecutive blocks of a container.

    Attributes:
        container: its name in the backbone.
        blocks: their names in the backbone.
        layout: see `Block`, as for channels and extra_tokens.
        has_shortcut: whether the first block keeps the shape of what it takes.
        called_as_whole: whether the container is called, not its blocks one by one from outside.
    """

    container: str
    blocks: tuple[str, ...]
    layout: str
    channels: int
    extra_tokens: int
    has_shortcut: bool
    called_as_whole: bool

    @property
    def name(self) -> str:
        """The container's name; among the backbone's own children that of the first block."""
        return self.container or self.blocks[0]


def find_runs(backbone: nn.Module, in_channels: int = 3, size: Size | None = None) -> list[Run]:
    """Find the runs of a backbone, of nested ones the outermost; the backbone is not modified.

    `size` is the height and width of images that it takes; by default some are tried.

    Raises:
        InputError: the backbone fails with all of them.
    """
    probe = copy.deepcopy(backbone)
    nn.Module.train(probe, False)  # a host's own train would also freeze stages
    calls = record_calls(probe, in_channels, size)
    blocks = {module: as_block(module, own_calls) for module, own_calls in calls.items()}
    containers = {module for module in probe.modules() if consecutive(module, blocks)}
    for module in list(blocks):
        if isinstance(module, nn.Sequential) and containers.intersection(module.modules()):
            blocks[module] = None  # a container of runs is a stage, not a block
    runs = []
    inside = set()  # modules of the blocks found so far
    for name, container in probe.named_modules():
        if container in inside:
            continue
        for members in consecutive(container, blocks):  # anew, without the stages
            names = tuple(f"{name}.{member}".removeprefix(".") for member in members)
            first = blocks[container._modules[members[0]]]
            run = Run(
                container=name,
                blocks=names,
                layout=first.layout,
                channels=first.channels,
                extra_tokens=first.extra_tokens,
                has_shortcut=first.keeps_shape,
                called_as_whole=container in calls,
            )
            runs.append(run)
            for member in members:
                inside.update(container._modules[member].modules())
    return runs


def consecutive(container: nn.Module, blocks: dict[nn.Module, Block | None]) -> list[list[str]]:
    """Return the names in a container of each two or more consecutive blocks that may be a run."""
    groups = []
    previous = None
    for name, module in container._modules.items():
        block = blocks.get(module)
        if block and not isinstance(container, nn.Sequential) and is_layer(module):
            block = None  # as conv1 and conv2 inside a block, which follow each other as well
        if block and previous and block.follows(previous):
            groups[-1].append(name)
        elif block:
            groups.append([name])
        previous = block
    return [names for names in groups if len(names) > 1]


def as_block(module: nn.Module, calls: Sequence[Call]) -> Block | None:
    """Return a module as a block, or None.

    That is for a layer, repeated calls, an object's own forward, and an input that the module
    overwrites, as ReLU(inplace=True) does: it is not there any more for the branch.
    """
    images = {call.image for call in calls}
    if len(calls) > len(images) or not module._modules or "forward" in vars(module):
        return None
    if any(call.overwrites_input for call in calls):
        return None
    shape = calls[0].output_shape
    rank = len(shape)
    if rank == 3 and all(call.grid and is_grid(call.grid, call.image) for call in calls):
        rows, columns = calls[0].grid
        return Block(module, "tokens", shape[2], shape[1] - rows * columns, tuple(calls))
    if rank == 4:
        channels_first = all(is_grid(call.output_shape[2:], call.image) for call in calls)
        channels_last = all(is_grid(call.output_shape[1:3], call.image) for call in calls)
        if channels_first and not channels_last:
            return Block(module, "maps", shape[1], 0, tuple(calls))
        if channels_last and not channels_first:
            return Block(module, "maps, channels last", shape[3], 0, tuple(calls))
    return None


def is_layer(module: nn.Module) -> bool:
    """Whether a module has the weights of one layer, as a convolution with its norm."""
    return sum(parameter.dim() > 1 for parameter in module.parameters()) < 2


def is_grid(grid: Size, image: Size) -> bool:
    """Whether a grid has the aspect of an image, up to the rounding of its sides."""
    return abs(grid[0] * image[1] - grid[1] * image[0]) <= sum(image)


def grid_of(tokens: Tensor, arguments: Sequence[object]) -> Size | None:
    """Return the grid (H, W) of tokens (B, E + H W, C) that is among the arguments of a call."""
    pairs = [each for each in arguments if isinstance(each, tuple | list) and len(each) == 2]
    pairs += zip(arguments, arguments[1:], strict=False)  # H and W each an argument of its own
    for rows, columns in pairs:
        is_pair = isinstance(rows, int) and isinstance(columns, int)
        if is_pair and 0 <= tokens.shape[1] - rows * columns <= MAX_EXTRA_TOKENS:
            return rows, columns
    return None


def record_calls(
    backbone: nn.Module, in_channels: int, size: Size | None
) -> dict[nn.Module, list[Call]]:
    """Return the calls of each module of a backbone, on which the hooks stay."""
    calls = defaultdict(list)
    origins = WeakTensorKeyDictionary()  # the modules that returned a tensor
    image = None  # the size of what runs below, which `record` notes
    versions = {}  # of inputs, before each module runs

    def note_version(module: nn.Module, args: tuple) -> None:
        versions[module] = args[0]._version if args and isinstance(args[0], Tensor) else None

    def record(module: nn.Module, args: tuple, kwargs: dict, returned: object) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(returned, Tensor):
            grid = grid_of(returned, (*args[1:], *kwargs.values())) if returned.dim() == 3 else None
            producers = tuple(origins.get(args[0], ()))
            shapes = args[0].shape, returned.shape
            overwrites_input = args[0]._version != versions[module]
            calls[module].append(Call(image, *shapes, producers, grid, overwrites_input))
            origins.setdefault(returned, []).append(module)

    for module in backbone.modules():
        module.register_forward_pre_hook(note_version)
        module.register_forward_hook(record, with_kwargs=True)
    zeros = partial(next(backbone.parameters()).new_zeros, 1, in_channels)
    failure = None
    for images in images_to_try(backbone, size):
        calls.clear()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                for image in images:
                    backbone(zeros(*image))
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
    given = [to_2tuple(size)] if size else [(side, side) for side in SIDES]
    rectangles = [[(rows, 2 * columns), (2 * rows, columns)] for rows, columns in given]
    return [*rectangles, *([each] for each in given)]
