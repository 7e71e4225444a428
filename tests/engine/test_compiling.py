"""The compiled backbone: gradients of the eager one, one graph for all sizes, trainings as ever."""

import copy

import pytest
import torch
from mmengine.model import BaseModel
from torch import nn

from mrla_mm.backbones import MRLAResNet
from mrla_mm.engine import CompileBackboneHook
from mrla_mm.engine.compiling import compile_backbone, compile_by_inductor
from mrla_mm.errors import InputError

from ..backbones.common import FAMILIES, levels, randomize_zero_init
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
        images = torch.stack(images).to(next(self.parameters()))
        found = sum(level.square().mean() for level in levels(self.backbone, images))
        return dict(loss=found) if mode == "loss" else [found]


def outcome(backbone, image):
    backbone.zero_grad()
    outs = levels(backbone, image)
    sum(out.square().mean() for out in outs).backward()
    return outs, [p.grad for p in backbone.parameters() if p.grad is not None]


# Family, variant, and whether the norms are frozen.
QUICK = [("resnet18", "light", True)]
SLOW = [
    ("resnet18", "light-output", True),
    ("resnet18", "base", True),
    ("resnet18", "light", False),
    ("vit", "light", False),
]


@pytest.mark.parametrize(
    ("name", "variant", "norm_eval"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_one_graph_for_all_sizes_and_one_for_single_images(name, variant, norm_eval):
    torch.compiler.reset()
    torch.manual_seed(0)
    eager = randomize_zero_init(FAMILIES[name].mrla(variant)).double()
    eager.norm_eval = norm_eval
    eager.train()
    compiled = Model(copy.deepcopy(eager))
    backend = CountGraphs()
    compile_backbone(compiled, backend=backend, fullgraph=True)
    for batch, height, width in SIZES:
        image = torch.randn(batch, 3, height, width, dtype=torch.float64)
        found, expected = outcome(compiled.backbone, image), outcome(eager, image)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert backend.count == (2 if batch == 1 else 1)
    assert compiled.backbone.state_dict().keys() == eager.state_dict().keys()


def test_without_a_working_compiler_the_backbone_runs_as_it_is():
    def fail(graph, inputs):  # as inductor does without a C compiler
        raise torch._dynamo.exc.TorchDynamoException("no compiler\non this machine")

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


@pytest.mark.parametrize("unknown", [dict(mode="unknown"), dict(options=dict(unknown=1))])
def test_mode_and_options_reach_the_compiler(unknown):
    graph = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises((AttributeError, RuntimeError), match="unknown"):
        compile_by_inductor(graph, [torch.ones(2)], **unknown)


@pytest.mark.slow
def test_twenty_steps_by_the_default_compiler(monkeypatch):
    """One stage of a ResNet, since a CPU compiles a whole one for minutes."""
    # In this process: a pool of compiling ones may hang under pytest-xdist.
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)
    torch.compiler.reset()
    one_stage = dict(num_stages=1, strides=(1,), dilations=(1,), out_indices=(0,))
    attention = dict(type="MRLABase", head_channels=8)
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        options = dict(base_channels=8, zero_init_attention=False, **one_stage)
        model = Model(MRLAResNet(18, attention, **options))
        model.train()
        if compiled:
            compile_backbone(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses.append([])
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(*torch.rand(2, 3, 64, 96), mode="loss")["loss"]
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[0][-1] != pytest.approx(losses[0][0], rel=1e-2)  # it did learn
