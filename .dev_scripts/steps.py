"""Training steps of backbones and detectors, and the paths they can take.

Paths: "naive" computes the paper's equations in plain PyTorch, "fused" the same in few passes over
memory, "numba" and "triton" these passes as compiled loops and kernels. "plain" stands for a
backbone without layer attention.
"""

import copy
import os
from argparse import Namespace
from collections.abc import Sequence

import torch
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.model.efficient_conv_bn_eval import turn_on_efficient_conv_bn_eval_for_single_model
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor, nn

import measure
from mrla_mm.attention import AttentionResidual
from mrla_mm.errors import InputError
from mrla_mm.ops import choose_path

PATHS = ("naive", "fused", "numba", "triton")
HALF_LOSS_SCALE = 2.0**10  # in float16 most gradients of a mean would underflow


def set_path(path: str) -> None:
    """Make layer attention compute by one of the paths from now on."""
    os.environ["MRLA_OPS"] = "naive" if path.startswith("plain") else path


def usable_paths(args: Namespace) -> list[str]:
    """Paths that can run on the device in the precision of the steps, or those asked for."""
    if args.paths:
        return args.paths
    os.environ.pop("MRLA_OPS", None)
    dtype = amp_dtype(args.device) if args.amp else torch.float32
    default = choose_path(torch.zeros(1, 1, 1, 1, dtype=dtype, device=args.device)).path
    return [path for path in PATHS if path in ("naive", "fused", default)]


def amp_dtype(device: torch.device) -> torch.dtype:
    """Type that autocast computes in on a device."""
    return torch.float16 if device.type == "cuda" else torch.bfloat16


def randomize_zero_init(model: nn.Module) -> nn.Module:
    """Move the branches away from the identity they start as."""
    for module in model.modules():
        if isinstance(module, AttentionResidual):
            nn.init.uniform_(module.norm.weight, 0.02, 0.05)
    return model


def build_backbone(depth: int, attention: str | None, norm: str) -> nn.Module:
    """Build a ResNet, plain or with layer attention, with frozen or with batch statistics."""
    cfg = dict(type="mmdet.ResNet", depth=depth, zero_init_residual=False)
    cfg |= dict(norm_eval=norm == "frozen")
    if attention is not None:
        cfg |= dict(type="MRLAResNet", layer_attention=dict(type=attention))
    return randomize_zero_init(MODELS.build(cfg))


def build_detector(cfg: Config, *, plain: bool) -> nn.Module:
    """Build the detector of a config, or the same with mmdet's plain ResNet."""
    init_default_scope("mmdet")
    model = copy.deepcopy(cfg.model)
    backbone = model.backbone
    if backbone.type != "MRLAResNet":
        raise InputError(f"{cfg.filename} has a {backbone.type} in place of an MRLAResNet")
    backbone.init_cfg = None
    if plain:
        backbone.type = "mmdet.ResNet"
        for key in ("layer_attention", "attention_drop_path", "zero_init_attention"):
            backbone.pop(key, None)
    return randomize_zero_init(MODELS.build(model))


class Step:
    """One model's training step, forward and backward, on fixed random images.

    Args:
        model: backbone or detector.
        args: device, amp, batch_size, size (H, W); inference, channels_last: see benchmark.py.
        detector: the model is a detector, which gets boxes, masks and labels too.
        compiled: run it under torch.compile.
    """

    def __init__(
        self, model: nn.Module, args: Namespace, *, detector: bool = False, compiled: bool = False
    ) -> None:
        layout = torch.channels_last if args.channels_last else torch.preserve_format
        self.model = model.to(args.device, memory_format=layout)
        self.model.train(not args.inference)  # not chained: mmdet's ResNet returns nothing from it
        self.layout = layout
        self.args, self.detector = args, detector
        self.call = torch.compile(self.model) if compiled else self.model
        self.data = self.draw(args.batch_size, *args.size)

    def draw(self, batch: int, height: int, width: int) -> Tensor | dict:
        """Draw random images; for a detector with boxes, masks and labels, preprocessed."""
        if self.detector:
            shapes = [[3, height, width]] * batch
            packed = demo_mm_inputs(batch, shapes, num_classes=2, with_mask=True)
            return self.model.data_preprocessor(packed, True)
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(batch, 3, height, width, generator=generator)
        return images.to(self.args.device, memory_format=self.layout)

    def forward(self) -> Tensor:
        """Return the loss."""
        device = self.args.device
        with torch.autocast(device.type, amp_dtype(device), enabled=self.args.amp):
            if self.detector:
                return self.model.parse_losses(self.call(**self.data, mode="loss"))[0]
            return sum(level.float().pow(2).mean() for level in self.call(self.data))

    def __call__(self) -> Tensor:
        """Run a step, leaving the gradients in the parameters; or the inference alone."""
        if self.args.inference:
            with torch.no_grad():
                return self.forward()
        self.model.zero_grad(set_to_none=True)
        loss = self.forward()
        is_half = self.args.amp and amp_dtype(self.args.device) == torch.float16
        scale = HALF_LOSS_SCALE if is_half else 1
        (scale * loss).backward()
        return loss.detach()

    def memory(self) -> int:
        """Bytes: on a GPU the peak of a step, on a CPU what the forward pass saves for backward."""
        if self.args.device.type == "cuda":
            return measure.peak_bytes(self, self.args.device)
        return measure.saved_bytes(self.forward, self.model)


def fold_norms(step: Step) -> Step | None:
    """Let mmengine fold the frozen norms of a plain ResNet; None if none is frozen."""
    backbone = step.model.backbone if step.detector else step.model
    if all(norm.training for norm in backbone.modules() if isinstance(norm, nn.BatchNorm2d)):
        return None
    turn_on_efficient_conv_bn_eval_for_single_model(backbone)
    return step


def results(step: Step) -> Tensor:
    """Loss and gradients of a step in one float32 vector on the CPU."""
    torch.manual_seed(0)
    tensors = [step(), *(p.grad for p in step.model.parameters() if p.grad is not None)]
    return torch.cat([tensor.detach().flatten().float().cpu() for tensor in tensors])


def check_paths(step: Step, paths: Sequence[str]) -> dict[str, float]:
    """Compare each path with the naive one on the step that will be timed; return the errors.

    Batch statistics amplify rounding. How much is measured by changing the images by 1e-6 in the
    naive path; another path may differ by five times that. Where half precision amplifies it so
    much that a wrong path would pass, the comparison is in single precision. TF32 is off: paths
    compute the gate in different operations, and not all of them would round.
    """
    args = step.args
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        set_path("naive")
        expected = results(step)
        images = step.data["inputs"] if step.detector else step.data
        original = images.clone()
        images.mul_(1 + 1e-6 * torch.randn_like(images))
        noise = measure.relative_error([results(step)], [expected])
        images.copy_(original)
        if args.amp and 5 * noise > 0.5:
            step.args = Namespace(**{**vars(args), "amp": False})
            try:
                return check_paths(step, paths)
            finally:
                step.args = args
        errors, allowed = {}, max(0.1 if args.amp else 1e-3, 5 * noise)
        for path in paths:
            set_path(path)
            errors[path] = measure.check_parity(path, [results(step)], [expected], allowed)
        return errors
