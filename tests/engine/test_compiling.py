"""The compiled backbone: gradients of the eager one, one graph for all sizes, trainings as ever."""

import copy
import json
from unittest import mock

import pytest
import torch
from mmengine.model import BaseModel
from torch import nn

from mrla_mm.engine import CompileBackboneHook
from mrla_mm.engine.compiling import compile_backbone
from mrla_mm.errors import InputError

from ..backbones.common import FAMILIES, levels, randomize_zero_init
from ..conftest import ROOT, run_python, tiny_options
from .runs import EPOCHS, build

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # what torch's compiler says of itself
SIZES = [(2, 64, 96), (3, 96, 64), (1, 64, 96), (1, 96, 64)]


class CountGraphs:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


class Model(BaseModel):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, *images, mode):
        images = torch.stack(images).double()
        found = sum(level.square().mean() for level in levels(self.backbone, images))
        return dict(loss=found) if mode == "loss" else [found]


def outcome(backbone, image):
    backbone.zero_grad()
    outs = levels(backbone, image)
    sum(out.square().mean() for out in outs).backward()
    return outs, [p.grad for p in backbone.parameters() if p.grad is not None]


QUICK = [("resnet18", "light")]  # tracing takes most of a minute each
SLOW = [("resnet18", variant) for variant in ("light-output", "base", "mla", "linear")]
SLOW += [(name, "light") for name in ("vit", "ceit", "pvtv2", "efficientnet", "regnet", "swin")]


@pytest.mark.parametrize(
    ("name", "variant"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_one_graph_for_all_sizes_and_one_for_single_images(name, variant):
    torch.compiler.reset()
    torch.manual_seed(0)
    eager = randomize_zero_init(FAMILIES[name].mrla(variant)).double().train()
    compiled = Model(copy.deepcopy(eager))
    backend = CountGraphs()
    compile_backbone(compiled, backend=backend, fullgraph=True)
    for batch, height, width in SIZES:
        image = torch.randn(batch, 3, height, width, dtype=torch.float64)
        found, expected = outcome(compiled.backbone, image), outcome(eager, image)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert backend.count == (2 if batch == 1 else 1)
    assert compiled.backbone.state_dict().keys() == eager.state_dict().keys()


def fail(graph, inputs):
    raise RuntimeError("no compiler\non this machine")


def test_without_a_working_compiler_the_backbone_runs_as_it_is(caplog):
    torch.compiler.reset()
    eager = FAMILIES["resnet18"].mrla().double()
    model = Model(copy.deepcopy(eager))
    compile_backbone(model, backend=fail)
    image = torch.randn(2, 3, 64, 64).double()
    torch.testing.assert_close(outcome(model.backbone, image), outcome(eager, image))


def test_a_model_without_a_backbone_is_refused():
    with pytest.raises(InputError, match="Linear has no backbone"):
        compile_backbone(nn.Linear(2, 2))


@pytest.mark.slow
def test_a_compiled_training_is_the_eager_one_resumed_too(tmp_path):
    """With EMA, whose copy is of the module itself."""
    states = {}
    for name in ("eager", "compiled"):
        torch.compiler.reset()
        hooks = [dict(type="EMAHook")]
        if name == "compiled":
            hooks.append(CompileBackboneHook(backend=CountGraphs()))
        for epochs, resume in ((1, False), (2, True)):
            torch.manual_seed(0)
            model = Model(FAMILIES["resnet18"].mrla(zero_init_attention=False)).double()
            options = dict(loop=dict(EPOCHS, max_epochs=epochs), hooks=copy.deepcopy(hooks))
            runner = build(
                tmp_path / name, model=model, shape=(3, 64, 64), resume=resume, **options
            )
            runner.train()
        checkpoint = torch.load(tmp_path / name / "epoch_2.pth", weights_only=True)
        states[name] = {key: checkpoint[key] for key in ("state_dict", "ema_state_dict")}
    torch.testing.assert_close(states["compiled"], states["eager"])


@pytest.mark.slow
def test_mode_and_options_reach_the_compiler():
    torch.compiler.reset()
    model = Model(nn.Conv2d(3, 4, 3))
    image = torch.randn(2, 3, 8, 8)
    expected = model.backbone(image)
    seen = []
    real = torch._inductor.compile

    def watched(graph, inputs, options=None):
        seen.append(options)
        return real(graph, inputs, options=options)

    with mock.patch("torch._inductor.compile", watched):
        compile_backbone(model, options={"max_fusion_size": 8})
        torch.testing.assert_close(model.backbone(image), expected)
    assert seen == [{"max_fusion_size": 8}]


@pytest.mark.slow
def test_a_detector_trains_alike_by_the_default_compiler(coco_root, tmp_path):
    config = ROOT / "configs/retinanet_r50_mrla_light_1x.py"
    options = tiny_options(config.name, coco_root, "train_cfg.max_epochs=2", "randomness.seed=1")
    losses = {}
    for name, switch in {"eager": [], "compiled": ["--compile"]}.items():
        work_dir = tmp_path / name
        run_python(
            ROOT / "tools/train.py",
            config,
            *switch,
            "--work-dir",
            work_dir,
            "--cfg-options",
            *options,
            cwd=tmp_path,
        )
        (log,) = work_dir.glob("*/vis_data/scalars.json")
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        losses[name] = [row["loss"] for row in rows if "loss" in row]
        text = next(work_dir.glob("*/*.log")).read_text(encoding="utf-8")
        assert ("backbone compiled" in text) is bool(switch)
        assert "not compiled" not in text
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=1e-2)
