#!/usr/bin/env python
"""Train a small MRLA detector on generated shapes, evaluate it and draw what it finds: on a CPU.

The same command keeps the data and resumes an interrupted training; delete both folders to start
over.
"""

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import mmcv
from matplotlib.figure import Figure

from mrla_mm import cli
from mrla_mm.config import read_config
from mrla_mm.datasets import generate_shapes
from mrla_mm.engine.stopping import TERMINATED
from mrla_mm.errors import InputError
from mrla_mm.training import last_checkpoint

TOOLS = Path(__file__).resolve().parent
CONFIG = TOOLS.parent / "configs/quickstart/mask_rcnn_r18_mrla_light_shapes.py"
# What a newcomer wants to see of the tools' output; all of it is in the log file of each step.
SHOWN = re.compile(r"(Epoch\((train|val|test)\).*|error:.*)")
PICTURES = 12


def parse_args(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data/shapes", help="folder of the generated data set")
    folder = dict(type=Path, default=Path("work_dirs/quickstart"))
    parser.add_argument("--work-dir", **folder, help="folder for all results")
    parser.add_argument("--num-train", type=int, default=800, help="images to train on")
    parser.add_argument("--num-val", type=int, default=100, help="images to evaluate on")
    parser.add_argument("--epochs", type=int, default=5, help="epochs to train for")
    return parser.parse_args(argv)


def run_tool(name, *arguments, log_file):
    """Run a tool, showing the matching lines of its output; all of it goes to the log file."""
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    threads = max(1, min(4, (os.cpu_count() or 1) - 1))  # the data loader has a core of its own
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    # Threads that spin make a busy machine several times slower.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    command = [sys.executable, str(TOOLS / f"{name}.py"), *map(str, arguments)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with log_file.open("w") as log, subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            for line in process.stdout:
                log.write(line)
                if shown := SHOWN.search(line):
                    print(f"      {shown[0]}", flush=True)
        except BaseException:
            process.terminate()  # a training saves what it has
            log.write(process.stdout.read())
            raise
    if process.returncode:
        raise InputError(f"{name}.py failed, see the end of {log_file}")


def draw(cfg, checkpoint, work_dir):
    """Write a sheet of pictures, ground truth beside prediction."""
    # after mrla_mm, whose operators they need
    from mmdet.apis import inference_detector, init_detector
    from mmdet.registry import DATASETS
    from mmdet.structures.bbox import get_box_tensor
    from mmdet.utils import register_all_modules
    from mmdet.visualization import DetLocalVisualizer

    register_all_modules()
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    model = init_detector(cfg, str(checkpoint), device="cpu")
    visualizer = DetLocalVisualizer()
    visualizer.dataset_meta = dataset.metainfo
    figure = Figure(figsize=(12, 18), layout="compressed")
    for index, axes in enumerate(figure.subplots(-(-PICTURES // 2), 2).flat):
        axes.set_axis_off()
        if index < len(dataset):
            sample = dataset[index]["data_samples"]
            sample.gt_instances.bboxes = get_box_tensor(sample.gt_instances.bboxes)
            sample.pred_instances = inference_detector(model, sample.img_path).pred_instances
            image = mmcv.imread(sample.img_path, channel_order="rgb")
            visualizer.add_datasample("", image, sample, pred_score_thr=0.5)
            axes.imshow(visualizer.get_image())
    figure.savefig(work_dir / "gallery.jpg", dpi=100)


def main(argv=None):
    """Run the four steps."""
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    results = args.work_dir
    config = results / "config.py"
    print(f"[1/4] data: {args.num_train} + {args.num_val} pictures of shapes in {args.data}")
    generate_shapes(args.data, num_train=args.num_train, num_val=args.num_val)

    cfg = read_config(str(CONFIG), {"data_root": str(Path(args.data).absolute())})
    cfg.train_cfg.max_epochs = cfg.param_scheduler[-1].end = args.epochs
    results.mkdir(parents=True, exist_ok=True)
    cfg.dump(config)
    print(f"[2/4] training: {CONFIG.name}, {args.epochs} epochs", flush=True)
    arguments = (config, "--work-dir", results / "train", "--resume")
    run_tool("train", *arguments, log_file=results / "train.log")
    checkpoint = last_checkpoint(results / "train")

    print(f"[3/4] evaluation on {args.num_val} pictures that the training has not seen", flush=True)
    arguments = (config, checkpoint, "--work-dir", results / "test")
    run_tool("test", *arguments, log_file=results / "test.log")
    report = max((results / "test").glob("*/*.json"))
    metrics = json.loads(report.read_text().splitlines()[-1])

    print("[4/4] pictures", flush=True)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        draw(cfg, checkpoint, results)
    # mmdet reports no metric where nothing at all was detected.
    box, mask = (metrics.get(f"coco/{kind}_mAP_50", 0.0) for kind in ("bbox", "segm"))
    print(f"box AP50 {box:.3f}, mask AP50 {mask:.3f}")
    print(f"look at    {results}/gallery.jpg (ground truth | prediction)")
    demo, weights = (os.path.relpath(path) for path in (TOOLS / "demo.py", checkpoint))
    print(f"try next   {sys.executable} {demo} {args.data}/val2017 {config} --weights {weights}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
