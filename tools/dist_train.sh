#!/usr/bin/env bash
# Train on several GPUs of one or more machines: dist_train.sh CONFIG GPUS [train.py arguments]
# Environment: NNODES, NODE_RANK, MASTER_ADDR, PORT, PYTHON.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    sed -n '2,3s/^# //p' "$0" >&2
    exit 2
fi
config=$1 gpus=$2
shift 2

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "${NNODES:-1}" --node_rank "${NODE_RANK:-0}" --nproc_per_node "$gpus" \
    --master_addr "${MASTER_ADDR:-127.0.0.1}" --master_port "${PORT:-29500}" \
    "$(dirname "${BASH_SOURCE[0]}")/train.py" "$config" --launcher pytorch "$@"
