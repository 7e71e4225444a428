"""What the log and config of a run say of its machine and precision."""

import pytest
from mmengine.config import Config
from mmengine.optim import AmpOptimWrapper

from mrla_mm.analysis.runs import Session, settings

LOG = "GPU number: 2\n...\n- INFO - Epoch(train)  [1][ 50/100]  lr: 0.02\n"


@pytest.mark.parametrize(
    ("kind", "mixed"),
    [
        ("AmpOptimWrapper", True),
        (AmpOptimWrapper, True),
        ("mmengine.optim.optimizer.amp_optimizer_wrapper.AmpOptimWrapper", True),
        ("BFloat16OptimWrapper", True),
        ("OptimWrapper", False),
        (None, False),
    ],
)
def test_precision_is_told_by_the_optimizer_wrapper(kind, mixed, tmp_path):
    """Whatever form its type has; a run in bfloat16 is no run in float32 either."""
    wrapper = {} if kind is None else dict(type=kind)
    cfg = Config(dict(optim_wrapper=wrapper, train_dataloader=dict(batch_size=4)))
    found = settings(Session(tmp_path, cfg, [], {}, LOG))
    assert found == dict(gpus=2, batch=8, amp=mixed, images=800)
