#!/usr/bin/env bash
#SBATCH --job-name=torchmars
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#
# Train on this machine, on several by hand (the same command on each), or as a SLURM job:
#
#   ./run_train.sh [--section.key value ...]
#   NNODES=2 RDZV_ENDPOINT=first-node:29400 ./run_train.sh [--section.key value ...]
#   sbatch --nodes=4 --gpus-per-node=8 run_train.sh [--section.key value ...]
#
#   CONFIG_FILE    the config (default: train_configs/quickstart.toml)
#   NGPU           ranks to start on each machine (default: one for each GPU; 2 on a machine without)
#   LOG_RANK       ranks of each machine whose output is shown, separated by commas (default: 0)
#   MAX_RESTARTS   times that all ranks are started again, from the newest checkpoint, after one has died (default: 0)
#   NNODES         machines (default: the job's; 1 outside of one)
#   NODE_RANK      number of this machine, 0 for the one that RDZV_ENDPOINT names (default: found out; in a job, its number there)
#   RDZV_ENDPOINT  HOST:PORT where the machines meet, HOST being one of them (default in a job: its first node and a port of the job's own)
#   RDZV_TIMEOUT   seconds that machines and ranks wait for each other at the start (default: 45)
#
# Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 save the run and end it; the same command goes on, and a SLURM job puts itself back into the queue. Exit codes:
# 0 complete; 2 a mistake in the config or the data; 75 stopped by a signal and saved; 70 a rank hung; 128 + n ended by signal n; else a crash.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) exec python -m torchmars.train --help ;; esac

root=$(dirname "$0")
batch=false
if [ -n "${SLURM_JOB_ID:-}" ] && [ "${ENVIRONMENT:-}" = BATCH ]; then
    batch=true
    root=$SLURM_SUBMIT_DIR  # $0 is a copy that SLURM made
    NNODES=${NNODES:-$SLURM_JOB_NUM_NODES}
    NGPU=${NGPU:-${SLURM_GPUS_ON_NODE:-}}
    if [ "$NNODES" -gt 1 ]; then  # a port below those that systems give away
        RDZV_ENDPOINT=${RDZV_ENDPOINT:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 12000))}
    fi
fi
NNODES=${NNODES:-1}
if [ "$NNODES" -gt 1 ] && [ -z "${RDZV_ENDPOINT:-}" ]; then
    echo "error: NNODES = $NNODES needs RDZV_ENDPOINT=HOST:PORT, the same on every machine, HOST being one of them" >&2
    exit 2
fi
if [ -z "${NGPU:-}" ]; then
    NGPU=2
    if command -v nvidia-smi >/dev/null; then
        NGPU=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')
    fi
fi
CONFIG_FILE=${CONFIG_FILE:-"$root/train_configs/quickstart.toml"}

export RDZV_TIMEOUT=${RDZV_TIMEOUT:-45}
cores=$(nproc)
[ "$batch" = false ] || cores=${SLURM_CPUS_ON_NODE:-$cores}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}
launch=(--nnodes "$NNODES" --nproc-per-node "$NGPU" --rdzv-backend c10d --rdzv-id "${SLURM_JOB_ID:-torchmars}"
        --rdzv-endpoint "${RDZV_ENDPOINT:-localhost:0}" --rdzv-conf "join_timeout=$RDZV_TIMEOUT,read_timeout=$RDZV_TIMEOUT" --max-restarts "${MAX_RESTARTS:-0}"
        --local-ranks-filter "${LOG_RANK:-0}" -m torchmars.train "$CONFIG_FILE" "$@")
if [ "$batch" = false ]; then
    exec python -m torchmars.launch "${launch[@]}"
fi

# Data and checkpoints are checked once; then one launcher on each node of the job, its ranks on all CPUs that the job has there. What this script
# is told goes to all of them.
python -m torchmars.prepare "$CONFIG_FILE" --nodes "$NNODES" --ranks "$((NGPU * NNODES))" "$@"
srun --ntasks="$NNODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 bash -c 'NODE_RANK=$SLURM_NODEID exec python -m torchmars.launch --prepared "$@"' - "${launch[@]}" &
step=$!
SECONDS=0
trap 'kill -USR1 "$step" || true' USR1 TERM
code=0
while kill -0 "$step" 2>/dev/null; do  # a signal ends a wait early
    code=0
    wait "$step" || code=$?
done

# Back into the queue, unless the run is complete or mistaken, the job was cancelled, or it has failed at once twice in a row.
state=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p')
again=false
if [ "$state" = RUNNING ] && [ "$code" -eq 75 ]; then
    again=true
    scontrol update JobId="$SLURM_JOB_ID" Comment="torchmars: stopped" || true
elif [ "$state" = RUNNING ] && [ "$code" -ne 0 ] && [ "$code" -ne 2 ]; then
    failed="failed at once"
    [ "$SECONDS" -lt 300 ] || failed="failed"
    again=true
    if [ "$failed" = "failed at once" ] && scontrol show job "$SLURM_JOB_ID" | grep -q "Comment=torchmars: failed at once"; then
        again=false
        echo "error: the run failed at once twice in a row (exit code $code): it is not put back into the queue" >&2
    fi
    scontrol update JobId="$SLURM_JOB_ID" Comment="torchmars: $failed" || true
fi
if [ "$again" = true ]; then
    echo "the run is not complete (exit code $code): the job goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
