"""What travels from block to block: nothing hidden, nothing copied, nothing overwritten, linear in depth."""

import pytest
import torch

from .stages import VARIANTS, Stage, build_blocks, random_maps, run

SIZE = {"depth": 4, "batch": 2, "channels": 24, "head_channels": 12, "grid": (5, 4)}


def tensors_of(memory):
    """The tensors in a memory, however its tuples nest."""
    if isinstance(memory, torch.Tensor):
        return [memory]
    return [tensor for part in memory or () for tensor in tensors_of(part)]


def memories_of(stage):
    """The memory that each block of the stage returns."""
    memory, memories = None, []
    for block, x, shortcut in zip(stage.blocks, stage.xs, stage.shortcuts, strict=True):
        _, memory = block(x, shortcut, memory)
        memories.append(memory)
    return memories


def full_maps(memory, like):
    """Data pointers of the memory's tensors that are as large as a feature map or larger, and their sizes."""
    return [(tensor.data_ptr(), tensor.numel()) for tensor in tensors_of(memory) if tensor.numel() >= like.numel()]


@pytest.mark.parametrize("variant", ["base (a)", "base, identity value", "MLA (a)"])
def test_each_earlier_layer_is_kept_once_and_not_copied(variant):
    stage = Stage.draw(variant, **SIZE)
    kept = [full_maps(memory, stage.xs[0]) for memory in memories_of(stage)]
    for t, maps in enumerate(kept):
        pointers = [pointer for pointer, _ in maps]
        assert len(pointers) == len(set(pointers)) == t + 1
        assert all(size == stage.xs[0].numel() for _, size in maps)
        if t > 0:
            assert set(pointers) > {pointer for pointer, _ in kept[t - 1]}


@pytest.mark.parametrize("variant", ["light", "light, last output", "light, no history (b)", "linear RLA"])
def test_recurrent_variants_carry_a_memory_of_constant_size(variant):
    stage = Stage.draw(variant, **SIZE)
    sizes = {sum(tensor.numel() for tensor in tensors_of(memory)) for memory in memories_of(stage)}
    assert len(sizes) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_is_written_in_place(variant):
    stage = Stage.draw(variant, **SIZE)
    with torch.no_grad():
        memory = None
        for block, x, shortcut in zip(stage.blocks, stage.xs, stage.shortcuts, strict=True):
            given = [x, shortcut, *tensors_of(memory)]
            before = [(tensor, tensor.clone(), tensor._version) for tensor in given]
            memory_before = tensors_of(memory)
            out, next_memory = block(x, shortcut, memory)
            for tensor, copy, version in before:
                assert torch.equal(tensor, copy)
                assert tensor._version == version
            assert [id(tensor) for tensor in tensors_of(memory)] == [id(tensor) for tensor in memory_before]
            again, _ = block(x, shortcut, memory)
            assert torch.equal(out, again)
            memory = next_memory


@pytest.mark.parametrize("variant", VARIANTS)
def test_interleaved_stages_do_not_disturb_each_other(variant):
    """The same modules over two batches at once, block by block, as when a step is replayed under checkpointing."""
    stage = Stage.draw(variant, **SIZE)
    inputs = [(stage.xs, stage.shortcuts), tuple(random_maps(4, (1, 24, 2, 3)) for _ in range(2))]
    alone = [run(stage.blocks, xs, shortcuts) for xs, shortcuts in inputs]
    memories = [None, None]
    for t, block in enumerate(stage.blocks):
        for which, (xs, shortcuts) in enumerate(inputs):
            out, memories[which] = block(xs[t], shortcuts[t], memories[which])
            assert torch.equal(out, alone[which][t])


def saved_elements(forward, parameters):
    """Number of elements that a forward pass keeps for its backward pass, each storage counted once."""
    held = {}
    exempt = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in exempt:
            held[storage.data_ptr()] = (storage.nbytes() // tensor.element_size(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = forward()  # the results hold the graph, hence the storages: no address is used twice
    del results
    return sum(size for size, _ in held.values())


def saved_by_depth(forward_of, depths, shape):
    """Saved elements in units of one feature map, per depth."""
    xs = [x.requires_grad_() for x in random_maps(max(depths), shape)]
    return [forward_of(xs[:depth]) / xs[0].numel() for depth in depths]


def second_differences(counts):
    steps = [after - before for before, after in zip(counts, counts[1:], strict=False)]
    return [after - before for before, after in zip(steps, steps[1:], strict=False)]


DEPTHS = range(1, 7)
MAP = (2, 48, 16, 16)


@pytest.mark.parametrize("name", ["MRLALight", "MRLABase", "LinearRLA"])
def test_memory_for_backward_grows_linearly_with_depth(name):
    blocks = build_blocks(name, 6, 48, 12)
    parameters = [parameter for block in blocks for parameter in block.parameters()]

    def count(xs):
        return saved_elements(lambda: run(blocks[: len(xs)], xs, xs), parameters)

    counts = saved_by_depth(count, DEPTHS, MAP)
    assert all(abs(change) < 0.1 for change in second_differences(counts)[1:]), counts


def test_the_measure_sees_concatenation():
    """Concatenated values, the form of Algorithm 1's pseudo code, cost one map more with every block."""

    def concatenated(xs):
        outputs = []
        for t in range(len(xs)):
            values = torch.stack(xs[: t + 1])
            weights = torch.ones(t + 1, 1, 1, 1, 1, dtype=values.dtype, requires_grad=True)
            outputs.append((weights * values).sum(0))
        return outputs

    counts = saved_by_depth(lambda xs: saved_elements(lambda: concatenated(xs), []), DEPTHS, MAP)
    assert all(abs(change - 1) < 0.1 for change in second_differences(counts)), counts
