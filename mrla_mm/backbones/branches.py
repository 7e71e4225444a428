"""The residual branches of a run of blocks: each block of any backbone carries its own.

A block gets its branch as `block.mrla`, which leaves all plain keys as they are. `add_mixin` then
changes the block's class to a subclass, made on the fly, that runs the block and the branch. For a
variant with a memory it also changes the class of the module that calls the blocks, so that the
memory is passed on.
"""

from functools import cache

from mmdet.models.backbones.swin import SwinBlockSequence
from torch import Tensor, nn

from mrla_mm.attention import LayerAttentionResidual, TokenAttentionResidual
from mrla_mm.backbones.checkpointing import run_checkpointed
from mrla_mm.backbones.runs import Run, Size, find_grid
from mrla_mm.errors import InputError


@cache
def make_class(*parts: type) -> type:
    """Make the class with these bases, mixins and then a host's class; its objects pickle."""
    name = f"{parts[-1].__name__}WithLayerAttention"
    return type(name, parts, {"__reduce__": reduce_object})


def reduce_object(made: object) -> tuple:
    """Return what pickle stores of an object: the bases of its class, and its attributes."""
    return new_object, type(made).__bases__, made.__dict__


def new_object(*parts: type) -> object:
    """Make an object of a class from `make_class`, still without attributes."""
    cls = make_class(*parts)
    return cls.__new__(cls)


def add_mixin(module: nn.Module, mixin: type) -> None:
    """Change a module's class to a subclass of it in which the mixin comes first."""
    cls = type(module)
    is_made = vars(cls).get("__reduce__") is reduce_object
    module.__class__ = make_class(mixin, *(cls.__bases__ if is_made else (cls,)))


class ChannelsLastResidual(LayerAttentionResidual):
    """The residual branch over maps (B, H, W, C)."""

    def forward(self, x: Tensor, shortcut: Tensor | None, *memory: Tensor) -> tuple[Tensor, ...]:
        """Add the attention to x; its memory has maps (B, C, H, W)."""
        maps = [each if each is None else each.permute(0, 3, 1, 2) for each in (x, shortcut)]
        y, *memory = super().forward(*maps, *memory)
        return y.permute(0, 2, 3, 1), *memory


BRANCH_CLASSES = {
    "maps": LayerAttentionResidual,
    "maps, channels last": ChannelsLastResidual,
    "tokens": TokenAttentionResidual,
}


def run_branch(
    block: nn.Module, out: Tensor, x: Tensor, arguments: tuple, *memory: Tensor
) -> tuple[Tensor, ...]:
    """Run a block's branch on what the block returned for x and arguments; return y and memory."""
    branch = block.mrla
    inputs = [out, x if branch.has_shortcut else None]
    if isinstance(branch, TokenAttentionResidual):
        inputs.append(find_grid(out, arguments))
    return run_checkpointed(getattr(block, "with_cp", False), branch, *inputs, *memory)


class BlockWithoutMemory:
    """Mixin of a block whose variant has no memory: called like the plain block."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Run the block as its class does, then the branch."""
        out = super().forward(x, *args, **kwargs)
        return run_branch(self, out, x, (*args, *kwargs.values()))[0]


class BlockWithMemory:
    """Mixin of a block whose variant has a memory, which its caller passes on."""

    # All is positional, since mmengine's activation_checkpointing passes no keywords.
    def forward(self, x: Tensor, args: tuple, *memory: Tensor) -> tuple[Tensor, ...]:
        """Run the block with x and a tuple of others, then the branch; return y and memory."""
        return run_branch(self, super().forward(x, *args), x, args, *memory)


class SequentialWithMemory:
    """Mixin of an `nn.Sequential` that passes on the memory of its runs."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks; each run starts with an empty memory."""
        memory = ()
        for block in self:
            if isinstance(block, BlockWithMemory):
                if block.mrla.first_in_stage:
                    memory = ()
                x, *memory = block(x, (), *memory)
            else:
                x = block(x)
        return x


class SwinStageWithMemory:
    """Mixin of a stage of mmdet's Swin, whose blocks are one run over tokens (B, H * W, C)."""

    def forward(self, x: Tensor, hw_shape: Size) -> tuple:
        """Run the blocks with their layer attention, then merge patches as the host does."""
        memory = ()
        for block in self.blocks:
            x, *memory = block(x, (hw_shape,), *memory)
        if self.downsample is None:
            return x, hw_shape, x, hw_shape
        return *self.downsample(x, hw_shape), x, hw_shape


CONTAINER_MIXINS = {nn.Sequential: SequentialWithMemory, SwinBlockSequence: SwinStageWithMemory}


def add_branches(model: nn.Module, run: Run, attention: dict, options: dict) -> None:
    """Give each block of a run its branch, and let their caller pass on a memory."""
    for block in run.blocks:
        own = dict(first_in_stage=block is run.blocks[0], has_shortcut=block.keeps_shape)
        if block.layout == "tokens":
            own |= dict(norm_cfg=None, extra_tokens=block.extra_tokens)  # None for LayerNorm
        module = block.module
        module.mrla = BRANCH_CLASSES[block.layout](attention, block.channels, **options | own)
        has_memory = getattr(module.mrla.attention, "has_memory", True)
        add_mixin(module, BlockWithMemory if has_memory else BlockWithoutMemory)
    if any(isinstance(block.module, BlockWithMemory) for block in run.blocks):
        let_container_pass_memory(model.get_submodule(run.blocks[0].caller), run, attention)


def let_container_pass_memory(caller: nn.Module, run: Run, attention: dict) -> None:
    """Make the module that calls a run's blocks pass their memory on; InputError if it cannot."""
    if isinstance(caller, tuple(CONTAINER_MIXINS.values())):  # it calls another run too
        return
    for host, mixin in CONTAINER_MIXINS.items():
        if isinstance(caller, host) and type(caller).forward is host.forward:
            add_mixin(caller, mixin)
            return
    raise InputError(
        f"{attention['type']} hands a memory from block to block, which the "
        f"{type(caller).__name__} that calls {run.name} cannot pass on: take MRLALight with "
        'previous="shortcut" or "none", or leave this run out by stages='
    )
