#!/usr/bin/env bash
# Everything that needs a GPU, in stages of at most ten minutes: measure_gpu.sh [STAGE ...], default all.
#   tests                  kernels, operators and mixed precision on CUDA
#   bandwidth              kernels against a copy of the same bytes, and growth with the depth of a stage
#   goals_amp goals_fp32   step and memory of light R50 and base R101 beside plain and naive, 2 x 800 x 1344
#   memory detector        the paper's memory table; a whole RetinaNet
#   compiled               torch.compile
#   nccl                   one process with NCCL, batch norms converted to SyncBN
#   retinanet faster_rcnn mask_rcnn   R50 plain, light and base from scratch, batches of 8 at full size, 300 iterations,
#                          float32 and float16: the logs have losses, seconds an iteration and memory
# Environment: DATA_ROOT (a folder in COCO's layout, data/coco), OUT (reports, work_dirs/gpu), PYTHON, ITERS (300).
set -euo pipefail

python=${PYTHON:-python} out=${OUT:-work_dirs/gpu} data=${DATA_ROOT:-data/coco}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"$python" -c 'import torch; torch.cuda.is_available() or exit("no GPU: torch.cuda.is_available() is False")'
[[ $# -gt 0 ]] || set -- tests bandwidth goals_amp goals_fp32 memory detector compiled nccl \
    retinanet faster_rcnn mask_rcnn

benchmark() {
    "$python" .dev_scripts/benchmark.py "$@" --out "$out/$stage"
}
full=(--batch-size 2 --size 800 1344)
for stage in "$@"; do
    case $stage in
    tests)  # -v: a run that is cut short has named what failed
        "$python" -m pytest -v -p no:cacheprovider -o faulthandler_timeout=120 -m "not slow" -n "${WORKERS:-8}" \
            tests/ops tests/attention tests/compat tests/backbones
        ;;
    bandwidth) benchmark branch depth --amp "${full[@]}" ;;
    goals_amp) benchmark goals --amp "${full[@]}" ;;
    goals_fp32) benchmark goals "${full[@]}" ;;
    memory) benchmark oom ;;
    detector) benchmark detector --amp --config configs/retinanet_r50_mrla_light_1x.py ;;
    compiled) benchmark compiled --amp "${full[@]}" ;;
    nccl)
        PYTHON=$python tools/dist_train.sh configs/faster_rcnn_r50_mrla_light_1x.py 1 --work-dir "$out/nccl" \
            --cfg-options "data_root=$data" train_cfg.max_epochs=1 model.backbone.norm_cfg.type=SyncBN \
            model.backbone.norm_eval=False model.backbone.init_cfg=None
        ;;
    retinanet | faster_rcnn | mask_rcnn)
        mkdir -p "$out"
        for run in "${stage}_r50"{,_mrla_light,_mrla_base}_1x; do
            cat > "$out/$run.py" << EOF
_base_ = "$PWD/configs/$run.py"
model = dict(backbone=dict(init_cfg=None, frozen_stages=-1, norm_eval=False))  # from scratch nothing may stay frozen
train_cfg = dict(_delete_=True, type="IterBasedTrainLoop", max_iters=${ITERS:-300})
train_dataloader = dict(batch_size=8, sampler=dict(_delete_=True, type="InfiniteSampler"))
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(by_epoch=False, interval=${ITERS:-300}))
log_processor = dict(by_epoch=False)
val_dataloader = val_evaluator = val_cfg = None
EOF
            for precision in fp32 fp16; do
                amp=(); [[ $precision = fp32 ]] || amp=(--amp)
                "$python" tools/train.py "$out/$run.py" "${amp[@]}" --work-dir "$out/${run}_$precision" \
                    --cfg-options "data_root=$data"
                ! grep -E '"loss": (NaN|-?Infinity)' "$out/${run}_$precision"/*/vis_data/scalars.json || exit 1
            done
        done
        ;;
    *)
        echo "unknown stage $stage" >&2
        exit 2
        ;;
    esac
done
