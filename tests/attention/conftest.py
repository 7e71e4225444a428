"""One thread: the tensors are tiny, and on a busy machine idle threads that spin cost far more than they give."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
