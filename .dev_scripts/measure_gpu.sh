#!/usr/bin/env bash
# Everything that needs a GPU, in stages: measure_gpu.sh [tests|goals|memory|detector|compiled|training ...], default all.
# tests: kernels, operators and mixed precision on CUDA; goals, memory, detector, compiled: the GPU columns of
# docs/benchmarks.md; training: R50 configs at full size for 300 iterations, in fp32, fp16 and bf16.
# Environment: DATA_ROOT (a folder in COCO's layout, data/coco), OUT (reports, work_dirs/gpu), PYTHON, ITERS (300).
set -euo pipefail

python=${PYTHON:-python} out=${OUT:-work_dirs/gpu}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"$python" -c 'import torch; torch.cuda.is_available() or exit("no GPU: torch.cuda.is_available() is False")'
[[ $# -gt 0 ]] || set -- tests goals memory detector compiled training

benchmark() {
    "$python" .dev_scripts/benchmark.py "$@"
}
for stage in "$@"; do
    case $stage in
    tests) "$python" -m pytest -q -p no:cacheprovider tests/ops tests/attention tests/compat tests/backbones ;;
    goals) benchmark goals branch depth --amp --out "$out/goals" ;;
    memory) benchmark goals oom --out "$out/memory" ;;
    detector) benchmark detector --amp --config configs/retinanet_r50_mrla_light_1x.py --out "$out/detector" ;;
    compiled) benchmark compiled --amp --out "$out/compiled" ;;
    training)
        "$python" .dev_scripts/check_training.py --data-root "${DATA_ROOT:-data/coco}" --iters "${ITERS:-300}" \
            --out "$out/training"
        ;;
    *)
        echo "unknown stage $stage: use tests, goals, memory, detector, compiled or training" >&2
        exit 2
        ;;
    esac
done
