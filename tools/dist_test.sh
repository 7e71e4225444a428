#!/usr/bin/env bash
# Evaluate on several GPUs of one or more machines: dist_test.sh CONFIG CHECKPOINT GPUS [test.py arguments]
# Environment: NNODES, NODE_RANK, MASTER_ADDR, PORT, PYTHON.
set -euo pipefail

if [[ $# -lt 3 ]]; then
    sed -n '2,3s/^# //p' "$0" >&2
    exit 2
fi
config=$1 checkpoint=$2 gpus=$3
shift 3

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "${NNODES:-1}" --node_rank "${NODE_RANK:-0}" --nproc_per_node "$gpus" \
    --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${PORT:-29500}" \
    "$(dirname "${BASH_SOURCE[0]}")/test.py" "$config" "$checkpoint" --launcher pytorch "$@"
