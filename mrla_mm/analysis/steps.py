"""Training and inference steps of backbones and detectors, as a benchmark times and weighs them."""

import copy
from argparse import Namespace
from collections.abc import Sequence

import torch
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval_for_single_model
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor, nn

from mrla_mm.analysis import benchmark
from mrla_mm.analysis.paths import take_path, wake
from mrla_mm.attention.residual import is_frozen
from mrla_mm.errors import InputError

HALF_LOSS_SCALE = 2.0**10  # as training has one in float16, where most gradients of a mean would be 0 without


def build_backbone(depth: int, attention: str | None, norm: str) -> nn.Module:
    """Build a ResNet, plain or with layer attention, for training with frozen or with batch statistics."""
    cfg = dict(type="mmdet.ResNet", depth=depth, norm_eval=norm == "frozen", zero_init_residual=False)
    if attention is not None:
        cfg |= dict(type="MRLAResNet", layer_attention=dict(type=attention))
    return wake(MODELS.build(cfg))


def build_detector(cfg: Config, plain: bool) -> nn.Module:
    """Build the detector of a config, with its own backbone or with mmdet's plain one of the same depth."""
    init_default_scope("mmdet")
    model = copy.deepcopy(cfg.model)
    backbone = model.backbone
    if backbone.type != "MRLAResNet":
        raise InputError(
            f"{cfg.filename} has a {backbone.type}; benchmarks of configs compare an MRLAResNet with plain ResNet"
        )
    backbone.init_cfg = None
    if plain:
        backbone.type = "mmdet.ResNet"
        for key in ("layer_attention", "attention_drop_path", "zero_init_attention"):
            backbone.pop(key, None)
    return wake(MODELS.build(model))


class Step:
    """One model's training or inference step on fixed random images, on one device.

    Args:
        model: backbone or detector.
        args: device, mode ("train" or "infer"), amp, channels_last, batch_size and size (H, W).
        detector: whether the model is a detector, which gets boxes, masks and labels too.
        compiled: run it under torch.compile.
    """

    def __init__(self, model: nn.Module, args: Namespace, *, detector: bool = False, compiled: bool = False) -> None:
        self.model = model.to(args.device)
        self.model.train(args.mode == "train")  # mmdet's ResNet returns nothing from it
        if args.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.args, self.detector = args, detector
        self.call = torch.compile(self.model) if compiled else self.model
        self.data = self.draw(args.batch_size, *args.size)

    def draw(self, batch: int, height: int, width: int) -> Tensor | dict:
        """Draw random images, for a detector with boxes, masks and labels, preprocessed."""
        generator = torch.Generator().manual_seed(0)
        if not self.detector:
            images = torch.randn(batch, 3, height, width, generator=generator).to(self.args.device)
            return images.contiguous(memory_format=torch.channels_last) if self.args.channels_last else images
        packed = demo_mm_inputs(batch, [[3, height, width]] * batch, num_classes=80, with_mask=True)
        return self.model.data_preprocessor(packed, True)

    def forward(self) -> Tensor | Sequence:
        """Run the forward pass: the loss, or in inference the outputs."""
        amp = torch.autocast(self.args.device.type, self.amp_dtype)
        with amp if self.args.amp else torch.autocast(self.args.device.type, enabled=False):
            if not self.detector:
                levels = self.call(self.data)
                return sum(level.float().pow(2).mean() for level in levels) if self.args.mode == "train" else levels
            if self.args.mode == "train":
                return self.model.parse_losses(self.call(**self.data, mode="loss"))[0]
            return self.call(**self.data, mode="predict")

    def __call__(self) -> Tensor | Sequence:
        """Run a step, leaving the gradients in the parameters."""
        if self.args.mode == "infer":
            with torch.no_grad():
                return self.forward()
        self.model.zero_grad(set_to_none=True)
        loss = self.forward()
        scaled = self.args.amp and self.amp_dtype == torch.float16
        (HALF_LOSS_SCALE * loss if scaled else loss).backward()
        return loss.detach()

    @property
    def amp_dtype(self) -> torch.dtype:
        """Type that autocast computes in on the step's device."""
        return torch.float16 if self.args.device.type == "cuda" else torch.bfloat16

    def memory(self) -> int:
        """Bytes: the peak of a step on a GPU, what is kept for backward on a CPU."""
        if self.args.device.type == "cuda":
            return benchmark.peak_bytes(self, self.args.device)
        return benchmark.kept_bytes(self.forward, self.model) if self.args.mode == "train" else 0


def fold_norms(step: Step) -> Step | None:
    """Let mmengine fold the frozen norms of a plain ResNet, as MRLAResNet folds its own; None if it has none."""
    backbone = step.model.backbone if step.detector else step.model
    if not any(is_frozen(norm) for norm in backbone.modules()):
        return None
    turn_on_efficient_conv_bn_eval_for_single_model(backbone)
    return step


def results(step: Step) -> list[Tensor]:
    """Everything that two paths must agree on: loss or outputs, and gradients."""
    torch.manual_seed(0)
    out = step()
    if step.args.mode == "infer":
        return [] if step.detector else list(out)
    return [out.reshape(1), *(p.grad for p in step.model.parameters() if p.grad is not None)]


@benchmark.single_precision()
def check_paths(step: Step, paths: Sequence[str], args: Namespace) -> dict[str, float]:
    """Compare each path with the reference on the very step that will be timed.

    How far rounding alone carries in a network, through batch statistics above all, is seen from what rounding the
    images does to the reference; a path may differ by a few times that. Where half precision makes it so much that a
    wrong path would pass, single precision is compared.
    """
    take_path(step.model, "reference")
    expected = joined(results(step))
    images = step.data["inputs"] if step.detector else step.data
    original = images.clone()
    images.mul_(1 + 1e-6 * torch.randn_like(images))
    noise = benchmark.relative_error([joined(results(step))], [expected])
    images.copy_(original)
    if args.amp and 5 * noise > 0.5:
        step.args = Namespace(**{**vars(args), "amp": False})
        try:
            return check_paths(step, paths, step.args)
        finally:
            step.args = args
    errors = {}
    for path in paths:
        take_path(step.model, path)
        allowed = max(0.1 if args.amp else 1e-3, 5 * noise)
        errors[path] = benchmark.check_parity(path, [joined(results(step))], [expected], allowed)
    return errors


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of several tensors in one, in float32, on the CPU."""
    return torch.cat([tensor.detach().flatten().float().cpu() for tensor in tensors] or [torch.zeros(1)])
