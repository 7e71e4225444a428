"""The compiled loops where threads, forks and places to write are not what they usually are."""

import functools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mrla_mm.ops import choose_path, dispatch, proof

from ..conftest import run_python
from .cases import LAYOUTS, base_joined, draw, light, mla_joined, results
from .test_fused import poisoned

__all__ = ["poisoned"]  # a fixture of this module too
pytest.importorskip("numba", reason="numba is not installed")
loops = pytest.importorskip("mrla_mm.ops.loops")
SHAPE = (3, 32, 23, 17)  # above the size from which threads share a map


@pytest.fixture
def threads():
    yield torch.set_num_threads
    torch.set_num_threads(1)


def run(function, layout, path="numba"):
    depth = 0 if function is light else 2
    tensors = draw(SHAPE, "block end", depth=depth, history=not depth)
    bound = functools.partial(function, extent="block end", path=path)
    return results(bound, tensors, dtype=torch.float32, layout=layout)


@pytest.mark.parametrize("other", [torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 5).double()])
def test_loops_refuse_a_map_of_another_size_or_dtype(other):
    x = torch.zeros(2, 3, 4, 5)
    with pytest.raises(ValueError, match="float32 map"):
        dispatch.passes_of("numba").add_relu(x, other, out=x, pool=True)


@pytest.mark.parametrize("function", [light, base_joined, mla_joined])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_threads(layout, function, threads):
    wanted = run(function, layout, "naive")
    for count in (3, 1, 2):
        threads(count)
        first = run(function, layout)
        torch.testing.assert_close(first, run(function, layout), rtol=0, atol=0)
        torch.testing.assert_close(first, wanted, rtol=1e-3, atol=1e-3)


def gradient(tensors):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    light(leaves, "attention", "numba").square().sum().backward()
    return leaves["value"].grad


def test_in_several_python_threads_and_after_a_fork(threads):
    threads(2)
    tensors = {name: tensor.float() for name, tensor in draw(SHAPE, "attention").items()}
    expected = gradient(tensors)
    with ThreadPoolExecutor(3) as executor:
        for found in executor.map(gradient, [tensors] * 6):
            assert torch.equal(found, expected)

    def compute_again(_):
        threads(1)  # OpenMP's do not survive a fork
        assert torch.equal(gradient(tensors), expected)

    if not torch.cuda.is_available():  # else torch has no backward pass after a fork
        torch.multiprocessing.start_processes(compute_again, start_method="fork")


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["c", "shortcut"])
def test_what_is_not_finite_is_as_in_torch(name, layout, bad):
    tensors = draw((2, 12, 5, 9), "block end", gated=False)
    tensors[name][1, 5, [0, 2, 4], [3, 8, 0]] = bad
    found = []
    for path in ("fused", "numba"):
        bound = functools.partial(light, extent="block end", path=path)
        found.append(results(bound, tensors, dtype=torch.float32, layout=layout))
    for key, wanted in found[0].items():
        ours = found[1][key]
        assert torch.equal(ours.isnan(), wanted.isnan()), key
        assert torch.equal(ours[ours.isinf()], wanted[wanted.isinf()]), key


def test_an_error_in_a_thread_is_raised(threads):
    def fail(start, *_):
        if start:
            raise MemoryError("no memory")

    fail.signatures = ["compiled"]
    threads(2)
    with pytest.raises(MemoryError, match="no memory"):
        loops.share(fail, 8, loops.MIN_SHARED)


def test_without_torchs_threads_one_does_all(monkeypatch, threads):
    threads(2)
    wanted = run(light, "contiguous")
    monkeypatch.setattr(loops, "openmp_parallel", lambda: None)
    torch.testing.assert_close(run(light, "contiguous"), wanted, rtol=0, atol=0)
    monkeypatch.setattr(dispatch, "openmp_parallel", lambda: None)
    monkeypatch.delenv("MRLA_OPS", raising=False)
    assert choose_path(torch.zeros(1, 4, 2, 2)).path == "fused"
    threads(1)
    assert choose_path(torch.zeros(1, 4, 2, 2)).path == "numba"


def test_self_checks_take_turns(monkeypatch):
    """They change modes of the whole process, and put back what they found."""
    running, counts = [], []

    def check(*_):
        running.append(True)
        counts.append(len(running))
        time.sleep(0.1)
        running.pop()
        return "", 0.0

    monkeypatch.setattr(proof, "OUTCOMES", {})
    monkeypatch.setitem(proof.SELF_CHECKS, "numba", check)
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(functools.partial(run, light), LAYOUTS))
    assert counts == [1, 1]


def test_without_numba_or_its_compiler_torch_runs(monkeypatch):
    x = torch.zeros(1, 4, 2, 2)
    monkeypatch.delenv("MRLA_OPS", raising=False)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert choose_path(x) == ("fused", "NUMBA_DISABLE_JIT is set")
    monkeypatch.delenv("NUMBA_DISABLE_JIT")
    monkeypatch.setattr(dispatch, "why_not_importable", lambda *_: "numba is not installed")
    assert choose_path(x) == ("fused", "numba is not installed")


def test_without_a_place_to_write():
    code = """
import torch
from mrla_mm.ops import self_check
print(self_check.probe("numba", torch.zeros(1, 32, 2, 2), ("light",)))
"""
    where = "UserProvidedCacheLocator"
    printed = run_python("-c", code, NUMBA_CACHE_DIR="/proc/no", NUMBA_CACHE_LOCATOR_CLASSES=where)
    assert "1 specialisations" in printed and "not used" not in printed
