#!/usr/bin/env bash
# What needs a GPU, 15 minutes of an H100 in all: measure_gpu.sh [STAGE ...], by default these in turn.
#   tests     equations, branches, backbones and operators on CUDA                                2 min
#   backbone  R50, 2 x 800 x 1344, float16: plain, light, base; eager and compiled                4 min
#   detector  training steps of RetinaNet and Faster R-CNN, plain and light; eager and compiled   4 min
#   training  RetinaNet with light, eager and compiled: 300 iterations each, their losses         3 min
#   r101      R101 as backbone, plain and base, eager                                             1 min
# Reports are OUT/<stage>/report.md: time, memory and how long the GPU is busy. A stage stops at twice its minutes.
# Environment: DATA_ROOT (a folder in COCO's layout, data/coco), OUT (work_dirs/gpu), PYTHON, ITERS (300), WORKERS (8).
set -euo pipefail

python=${PYTHON:-python} out=${OUT:-work_dirs/gpu} data=${DATA_ROOT:-data/coco} iters=${ITERS:-300}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"$python" -c 'import torch; torch.cuda.is_available() or exit("no GPU: torch.cuda.is_available() is False")'
[[ $# -gt 0 ]] || set -- tests backbone detector training r101
mkdir -p "$out"

benchmark() {
    timeout 480 "$python" .dev_scripts/benchmark.py --amp --batch-size 2 --size 800 1344 --out "$out/$stage" "$@"
}

train() {  # the name of a run, and its options
    timeout 360 "$python" tools/train.py "$out/retinanet.py" --amp --work-dir "$out/$1" "${@:2}" \
        --cfg-options "data_root=$data"
    grep -oh '"loss": [^,]*' "$out/$1"/*/vis_data/scalars.json > "$out/$1.losses"
    ! grep -iE 'nan|inf' "$out/$1.losses"
}

for stage in "$@"; do
    case $stage in
    tests)  # -v: a run that is cut short has named what failed
        timeout 240 "$python" -m pytest -v -p no:cacheprovider -m "not slow" -n "${WORKERS:-8}" \
            tests/test_functional.py tests/attention tests/compat tests/backbones
        ;;
    backbone) benchmark --models plain light base --compiled ;;
    detector)
        benchmark --compiled --models configs/retinanet_r50{,_mrla_light}_1x.py
        mv "$out/detector" "$out/retinanet"
        benchmark --compiled --models configs/faster_rcnn_r50{,_mrla_light}_1x.py
        ;;
    training)  # from scratch, where nothing may stay frozen
        cat > "$out/retinanet.py" << CONFIG
_base_ = "$PWD/configs/retinanet_r50_mrla_light_1x.py"
model = dict(backbone=dict(init_cfg=None, frozen_stages=-1, norm_eval=False))
train_cfg = dict(_delete_=True, type="IterBasedTrainLoop", max_iters=$iters)
train_dataloader = dict(batch_size=2, sampler=dict(_delete_=True, type="InfiniteSampler"))
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(by_epoch=False, interval=$iters))
log_processor = dict(by_epoch=False)
val_dataloader = val_evaluator = val_cfg = None
randomness = dict(seed=0)
CONFIG
        train eager
        train compiled --compile
        paste "$out/eager.losses" "$out/compiled.losses"
        ;;
    r101) benchmark --models plain base --depth 101 ;;
    *)
        echo "unknown stage $stage" >&2
        exit 2
        ;;
    esac
done
