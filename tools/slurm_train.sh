#!/usr/bin/env bash
# Train on a Slurm cluster, one task a GPU: slurm_train.sh PARTITION JOB CONFIG [train.py arguments]
# Environment: GPUS (all machines together), GPUS_PER_NODE, CPUS_PER_TASK, SRUN_ARGS (more options for srun), PORT, PYTHON.
set -euo pipefail

if [[ $# -lt 3 ]]; then
    sed -n '2,3s/^# //p' "$0" >&2
    exit 2
fi
partition=$1 job=$2 config=$3
shift 3
gpus=${GPUS:-8}
per_node=${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}
read -r -a extra <<<"${SRUN_ARGS:-}"

# mmengine's slurm launcher takes the port from MASTER_PORT and the address from the first node.
export MASTER_PORT=${PORT:-29500}
exec srun --partition "$partition" --job-name "$job" --gres "gpu:$per_node" \
    --ntasks "$gpus" --ntasks-per-node "$per_node" --cpus-per-task "${CPUS_PER_TASK:-5}" --kill-on-bad-exit=1 \
    ${extra[@]+"${extra[@]}"} \
    "${PYTHON:-python}" -u "$(dirname "${BASH_SOURCE[0]}")/train.py" "$config" --launcher slurm "$@"
