"""Files of timm's and the authors' DeiT, on other grids too, and of torchvision's EfficientNets."""

import pytest
import torch
import torchvision
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer

from mrla_mm.backbones import MRLAEfficientNet, MRLAViT
from mrla_mm.compat.config_scope import find_config
from mrla_mm.errors import InputError
from mrla_mm.weights import KeyStatus, load_weights

from .conftest import LIGHT, VARIANTS, save, without

DIM, HIDDEN, DEPTH, CLASSES = 32, 64, 4, 5
ARCH = dict(embed_dims=DIM, num_layers=DEPTH, num_heads=2, feedforward_channels=HIDDEN)

SIZES = dict(img_size=64, embed_dim=DIM, depth=DEPTH, num_heads=2, mlp_ratio=HIDDEN / DIM)


def build(attention=LIGHT, **more):
    arguments = dict(arch=ARCH, img_size=64, patch_size=16, stage_blocks=2) | more
    return MRLAViT(layer_attention=attention, **arguments)


def deit(variant=None, distilled=False):
    """Return a random state dict of timm's DeiT and, for a variant, with what the authors add."""
    kind = VisionTransformerDistilled if distilled else VisionTransformer
    state = kind(**SIZES, num_classes=CLASSES).state_dict()
    shapes = {name: tensor.shape for name, tensor in state.items()}
    for mrla in (f"blocks.{index}.mrla" for index in range(DEPTH if variant else 0)):
        shapes |= {f"{mrla}.mrla.{name}.weight": (1, 1, 3) for name in ("Wq", "Wk")}
        shapes |= {f"{mrla}.mrla.Wv.weight": (DIM, 1, 3, 3)}
        shapes |= {f"{mrla}.normx.{name}": (DIM,) for name in ("weight", "bias")}
        if variant == "light":
            shapes |= {
                f"{mrla}.{name}": (DIM,) for name in ("lambda_t", "normo.weight", "normo.bias")
            }
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("distilled", [False, True], ids=["", "distilled"])
@VARIANTS
def test_the_authors_files_load_and_convert(variant, attention, distilled, tmp_path):
    released = deit(variant, distilled)
    path = save(tmp_path, {"model": released})
    report = load_weights(model := build(attention, with_dist_token=distilled), path)
    matched = report.keys[KeyStatus.MATCHED]
    assert len(matched) == len(model.state_dict()) == len(released) - 2 - 2 * distilled
    assert not report.faults()
    names = {"norm.bias": "normx.bias", "attention.query.weight": "mrla.Wq.weight"}
    names |= {"attention.key.weight": "mrla.Wk.weight", "attention.value.weight": "mrla.Wv.weight"}
    if variant == "light":
        names |= {"attention.history_scale": "lambda_t", "history_norm.bias": "normo.bias"}
    for ours, theirs in names.items():
        tensor = model.state_dict()[f"layers.2.mrla.{ours}"]
        assert torch.equal(tensor, released[f"blocks.2.mrla.{theirs}"])
    heads = ["head", "head_dist"] if distilled else ["head"]
    biases = report.keys[KeyStatus.OUTSIDE][1::2]
    assert biases == [f"head.layers.{name}.bias" for name in heads]


@torch.no_grad()
@pytest.mark.parametrize("attention", [None, "MRLALight"])
def test_plain_deit_files_keep_their_outputs(attention, tmp_path):
    theirs = VisionTransformer(**SIZES, num_classes=CLASSES).double().eval()
    theirs.load_state_dict(deit())
    model = build(attention, out_type="raw").double().eval()
    model.init_weights()
    report = load_weights(model, save(tmp_path, {"model": deit()}))
    assert not report.faults()
    head = report.keys[KeyStatus.OUTSIDE]
    assert head == ["head.layers.head.weight", "head.layers.head.bias"]
    image = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(model(image)[-1], theirs.forward_features(image))


def test_positions_are_resized_and_reported(tmp_path):
    path, original = save(tmp_path, deit()), deit()["pos_embed"]
    report = load_weights(model := build(img_size=96), path)
    assert "(1, 17, 32) in the file, (1, 37, 32)" in report.table() and not report.faults()
    state = model.state_dict()["pos_embed"]
    assert torch.equal(state[:, :1], original[:, :1]) and state[:, 1:].std() > 0.01
    report = load_weights(model := build(with_cls_token=False, out_type="featmap"), path)
    assert report.keys[KeyStatus.NO_SUCH_PART] == ["cls_token"]
    assert "pos_embed (1, 17, 32) in the file, (1, 16, 32) in" in report.table()
    assert torch.equal(model.state_dict()["pos_embed"], original[:, 1:])


@pytest.mark.parametrize("shape", [(1, 18, DIM), (1, 16, DIM), (17, DIM)])
def test_positions_that_cannot_be_resized_are_a_mismatch(shape, tmp_path):
    path = save(tmp_path, deit() | {"pos_embed": torch.zeros(shape)})
    with pytest.raises(InputError, match="another shape: pos_embed"):
        load_weights(build(), path)
    assert len(load_weights(build(), path, strict=False).keys[KeyStatus.MISMATCHED]) == 1


def test_initialising_leaves_loaded_positions_alone(tmp_path):
    """mmpretrain would draw new positions over those of the file if init_cfg is a list."""
    init_cfg = [dict(type="Pretrained", checkpoint=str(save(tmp_path, deit())))]
    model = build(init_cfg=init_cfg)
    model.init_weights()
    assert torch.equal(model.state_dict()["pos_embed"], deit()["pos_embed"])


@pytest.fixture(scope="module")
def original():
    torch.manual_seed(0)
    model = torchvision.models.efficientnet_b0().eval()
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:
            low = -0.5 if name.endswith(("bias", "running_mean")) else 0.5
            tensor.uniform_(low, low + 1)
    return model


@pytest.fixture
def path(original, tmp_path):
    return save(tmp_path, original.state_dict())


@torch.no_grad()
@pytest.mark.parametrize("suffix", ["", "_mrla_light"])
def test_the_detectors_start_as_torchvisions_model(suffix, original, path):
    name = f"mrla_mm::efficientnet/retinanet_efficientnet_b0{suffix}_1x.py"
    cfg = Config.fromfile(find_config(name)).model.backbone
    cfg.init_cfg.checkpoint = str(path)
    init_default_scope("mmdet")
    backbone = MODELS.build(cfg)
    backbone.init_weights()
    image = torch.randn(2, 3, 97, 65)
    x, features = image, []
    for part in original.features:
        features.append(x := part(x))
    for index, level in zip((2, 3, 5, 7), backbone.eval()(image), strict=True):
        scale = features[index].abs().max().item()
        assert features[index].std() > 0.1
        torch.testing.assert_close(level, features[index], rtol=1e-5, atol=1e-5 * scale)
    report = load_weights(MODELS.build(cfg), path)
    theirs = original.state_dict()
    left_out = report.keys[KeyStatus.NO_SUCH_PART]
    assert len(left_out) == sum(key.startswith("features.8.") for key in theirs) == 6
    assert len(report.keys[KeyStatus.MATCHED]) == len(theirs) - 2 - 6
    assert report.keys[KeyStatus.OUTSIDE] == ["head.fc.weight", "head.fc.bias"]
    assert bool(report.keys[KeyStatus.NEW_ATTENTION]) == bool(suffix)
    assert not report.faults() and not report.keys[KeyStatus.MAY_BE_MISSING] and not report.warnings


def test_names_and_shapes_of_the_largest_size():
    with torch.device("meta"):
        theirs = torchvision.models.efficientnet_b7().state_dict()
    MRLAEfficientNet("b7", None).to("meta").load_state_dict(without(theirs, "classifier."))


@pytest.mark.parametrize("size", ["b1", "es"])
def test_another_size_is_refused(size, path):
    with pytest.raises(InputError, match="nothing was loaded"):
        load_weights(MRLAEfficientNet(size, out_indices=(2, 3, 4, 5)), path)
