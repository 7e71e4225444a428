#!/usr/bin/env python
"""Draw how much each layer attends to each earlier one of its stage, for an image or the mean over a folder.

  visualize_layer_attention.py CONFIG CHECKPOINT IMAGE_OR_FOLDER [--out-dir DIR]

Writes overview.png (each stage, mean over its heads), stage<n>.png (its heads) and scores.csv (every number).
"""

import argparse
import sys
from pathlib import Path

import mrla_mm  # noqa: F401  the stand-in ops must be in place before mmdet is imported

# isort: split
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint

from mrla_mm import cli
from mrla_mm.analysis import layer_attention_plots as plots
from mrla_mm.analysis.layer_attention import LayerAttentionRecorder
from mrla_mm.errors import InputError


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="visualize_layer_attention.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="config file, or package::name of a packed one")
    parser.add_argument("checkpoint", help="checkpoint file")
    parser.add_argument("input", help="image file, or folder of images")
    parser.add_argument(
        "--out-dir", type=Path, default=Path("work_dirs/layer_attention"), help="folder for the results"
    )
    parser.add_argument(
        "--max-heads", type=int, default=16, help="heads to draw of a stage, spread evenly (default: 16)"
    )
    parser.add_argument("--max-images", type=int, help="take at most so many images of a folder")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    parser.add_argument(
        "--cfg-options", nargs="+", action=cli.OptionsAction, default={}, metavar="KEY=VALUE", help="override config"
    )
    args = parser.parse_args(argv)
    for name in ("max_heads", "max_images"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(args, name)}: give a positive number")
    return args


def load_model(cfg, checkpoint, device):
    """Return the config's model with the weights of a checkpoint, ready to evaluate.

    Raises:
        InputError: the checkpoint is missing, or does not fit the model.
    """
    if not Path(checkpoint).is_file():
        raise InputError(f"checkpoint {checkpoint} does not exist: give a .pth file that tools/train.py wrote")
    model = MODELS.build(cfg.model)
    try:
        load_checkpoint(model, checkpoint, map_location="cpu", strict=True)
    except RuntimeError as error:
        raise InputError(f"checkpoint {checkpoint} does not fit the config's model: {error}") from error
    return model.to(device).eval()


def test_pipeline(cfg):
    """Return the config's test pipeline without what loads annotations.

    Raises:
        InputError: the config has none.
    """
    dataset = (cfg.get("test_dataloader") or {}).get("dataset")
    while dataset is not None and "dataset" in dataset:
        dataset = dataset["dataset"]
    if not dataset or "pipeline" not in dataset:
        raise InputError("the config has no test_dataloader.dataset.pipeline to prepare the images with")
    return Compose([step for step in dataset["pipeline"] if "LoadAnnotations" not in step["type"]])


def main(argv=None):
    """Run the model over the images, and draw what its layers attended to."""
    args = parse_args(argv)
    images = cli.find_images(args.input)[: args.max_images]
    cfg = Config.fromfile(cli.locate_config(args.config))
    cfg.merge_from_dict(args.cfg_options)
    init_default_scope(cfg.get("default_scope", "mmengine"))
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model, pipeline = load_model(cfg, args.checkpoint, device), test_pipeline(cfg)
    with torch.no_grad(), LayerAttentionRecorder(model) as recorder:
        for number, path in enumerate(images, 1):
            batch = pseudo_collate([pipeline(dict(img_path=str(path), img_id=number))])
            model.extract_feat(model.data_preprocessor(batch, False)["inputs"])
            print(f"[{number}/{len(images)}] {path.name}", flush=True)
    stages = recorder.stages()
    written = [plots.plot_overview(stages, args.out_dir / "overview.png")]
    for number, stage in enumerate(stages, 1):
        written.append(plots.plot_stage(stage, number, args.out_dir / f"stage{number}.png", max_heads=args.max_heads))
    written.append(plots.write_csv(stages, args.out_dir / "scores.csv"))
    print(f"mean over {len(images)} image{'s' if len(images) > 1 else ''}, written: {', '.join(map(str, written))}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
