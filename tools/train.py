#!/usr/bin/env python
"""Train the model of a config: `python tools/train.py configs/retinanet_r50_mrla_light_1x.py`."""

import sys

from mmengine import device

from mrla_mm import cli, training
from mrla_mm.errors import InputError


def parse_args(argv):
    """Parse the command line."""
    parser = cli.config_parser("Train the model of a config.")
    parser.add_argument("--amp", action="store_true", help="train in mixed precision (GPU only)")
    cli.add_compile_argument(parser)
    scale = "scale the learning rate to the total batch size"
    parser.add_argument("--auto-scale-lr", action="store_true", help=scale)
    checkpoint = dict(nargs="?", const="auto", metavar="CHECKPOINT")
    resume = "continue from this checkpoint, or from the last one in the work directory"
    parser.add_argument("--resume", **checkpoint, help=resume)
    cli.add_run_arguments(parser)
    return parser.parse_args(argv)


def main(argv=None):
    """Train with the given command line."""
    args = parse_args(argv)
    cfg = cli.load_config(args)
    if args.amp and device.get_device() == "cpu":
        option = "--cfg-options optim_wrapper.type=BFloat16OptimWrapper"
        raise InputError(f"--amp needs a GPU; for bfloat16 on a CPU: {option}")
    if args.amp:
        cfg.optim_wrapper.type = "AmpOptimWrapper"
        cfg.optim_wrapper.setdefault("loss_scale", "dynamic")
    if args.compile:
        training.add_hook(cfg, dict(type="CompileBackboneHook"))
    if args.auto_scale_lr:
        if "base_batch_size" not in cfg.get("auto_scale_lr", {}):
            raise InputError("--auto-scale-lr: the config has no auto_scale_lr.base_batch_size")
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        checkpoint = args.resume
        if checkpoint == "auto":
            checkpoint = training.last_checkpoint(cfg.work_dir)
        if checkpoint is None:
            print("--resume: no checkpoint yet, training starts from scratch")
        training.resume_from(cfg, checkpoint)
    try:
        training.train(cfg)
    except KeyboardInterrupt:
        remedy = f"--resume continues from the last checkpoint in {cfg.work_dir}"
        raise KeyboardInterrupt(remedy) from None


if __name__ == "__main__":
    sys.exit(cli.run(main))
