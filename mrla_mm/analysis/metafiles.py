"""OpenMMLab's metafiles: one entry for each config, with results only where a run of ours measured them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from mrla_mm.analysis.paper_rows import ROWS
from mrla_mm.analysis.runs import read_config

TITLE = "Cross-Layer Retrospective Retrieving via Layer Attention (Fang et al., ICLR 2023)"
# Collection by a part of the config's name; plain models are the baselines of all.
FAMILIES = {
    "deit": "MRLA-ViT",
    "ceit": "MRLA-CeiT",
    "pvtv2": "MRLA-PVTv2",
    "efficientnet": "MRLA-EfficientNet",
    r"_r\d+_|resnet": "MRLA-ResNet",
}
PLAIN = "Plain baselines"
VARIANTS = {"mrla_light": "MRLA-light", "mrla_base": "MRLA-base", "_mla_": "MLA"}
HEADER = "# Written by tools/collect_results.py from the configs and docs/measured.json.\n"
RESULTS = {
    "coco/bbox_mAP": ("Object Detection", "COCO", "box AP"),
    "coco/segm_mAP": ("Instance Segmentation", "COCO", "mask AP"),
    "accuracy/top1": ("Image Classification", "ImageNet-1k", "Top 1 Accuracy"),
    "accuracy/top5": ("Image Classification", "ImageNet-1k", "Top 5 Accuracy"),
}


def attention_of(name: str) -> str | None:
    """Layer attention that a config's name says, or None for a plain model."""
    return next((variant for part, variant in VARIANTS.items() if part in name), None)


def collection_of(name: str) -> str:
    """Collection of a config by its name."""
    if attention_of(name) is None:
        return PLAIN
    return next(collection for part, collection in FAMILIES.items() if re.search(part, name))


def data_of(name: str) -> str:
    """Training data of a config by its path below configs/."""
    if name.startswith("quickstart/"):
        return "generated shapes" if "shapes" in name else "8 images of COCO"
    return "ImageNet-1k" if name.startswith("imagenet/") else "COCO"


def results_of(name: str, runs: Sequence[Mapping]) -> list[dict]:
    """Measured results of a config as it stands, of its last recorded run."""
    models = {row.model for row in ROWS if row.config == name and not row.options}
    measured = [run["figures"] for run in runs if run["model"] in models and run["figures"]]
    tasks: dict[tuple[str, str], dict] = {}
    for key, (task, data, metric) in RESULTS.items():
        if measured and key in measured[-1]:
            tasks.setdefault((task, data), {})[metric] = measured[-1][key]
    return [dict(Task=task, Dataset=data, Metrics=metrics) for (task, data), metrics in tasks.items()]


def entry(path: Path, configs: Path, runs: Sequence[Mapping]) -> dict:
    """Entry of one config."""
    cfg, name = read_config(path), path.relative_to(configs).with_suffix("").as_posix()
    metadata = {"Training Data": data_of(name), "Epochs": cfg.train_cfg.max_epochs}
    if "base_batch_size" in cfg.get("auto_scale_lr", {}):
        metadata["Batch Size"] = cfg.auto_scale_lr.base_batch_size
    if attention_of(name):
        metadata["Architecture"] = [attention_of(name)]
    fields = {"Name": path.stem, "In Collection": collection_of(path.stem), "Config": f"configs/{name}.py"}
    found = {**fields, "Metadata": metadata, "Results": results_of(name, runs)}
    return {key: value for key, value in found.items() if value}


def folders(configs: Path) -> Iterator[Path]:
    """Folders that hold experiments, the shared fragments left out."""
    yield from sorted({path.parent for path in configs.rglob("*.py") if path.parent.name != "_base_"})


def write_all(configs: Path, runs: Sequence[Mapping]) -> dict[Path, str]:
    """Return the text of every metafile and of model-index.yml, by path below the checkout."""
    files = {}
    for folder in folders(configs):
        models = [entry(path, configs, runs) for path in sorted(folder.glob("*.py"))]
        files[Path("configs") / folder.relative_to(configs) / "metafile.yml"] = dump({"Models": models})
    collections = [
        {"Name": name, "Paper": {"Title": TITLE}, "README": "README.md"} for name in [*FAMILIES.values(), PLAIN]
    ]
    files[Path("model-index.yml")] = dump({"Import": [str(path) for path in files], "Collections": collections})
    return files


def dump(content: Mapping) -> str:
    """Return YAML in the order of the keys."""
    return HEADER + yaml.safe_dump(dict(content), sort_keys=False, width=120, allow_unicode=True)
