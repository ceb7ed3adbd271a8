#!/usr/bin/env bash
# Train on this machine: ./run_train.sh [--section.key value ...]
#
#   NGPU         ranks to start (default: one for each GPU; 2 on a machine without)
#   CONFIG_FILE  the config (default: train_configs/quickstart.toml)
#   LOG_RANK     ranks whose output is shown, separated by commas (default: 0)
#   MAX_RESTARTS times that all ranks are started again, from the newest checkpoint, after one has died (default: 0)
#
# Ctrl-C, SIGTERM and SIGUSR1 save the run and end it; the same command goes on. Exit codes: 0 complete; 2 a mistake in the config or
# the data; 75 stopped by a signal and saved; 70 a rank hung; 128 + n ended by signal n; anything else: a crash.
set -euo pipefail

CONFIG_FILE=${CONFIG_FILE:-"$(dirname "$0")/train_configs/quickstart.toml"}
LOG_RANK=${LOG_RANK:-0}
if [ -z "${NGPU:-}" ]; then
    NGPU=2
    if command -v nvidia-smi >/dev/null; then
        NGPU=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')
    fi
fi

case " $* " in *" --help "* | *" -h "*) exec python -m torchmars.train --help ;; esac

# The check comes first and on its own: torchrun turns every exit code of a rank into 1.
python -m torchmars.prepare "$CONFIG_FILE" --ranks "$NGPU" "$@"

cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > NGPU ? cores / NGPU : 1))}
exec python -m torchmars.launch --nproc-per-node "$NGPU" --rdzv-backend c10d --rdzv-endpoint localhost:0 \
    --max-restarts "${MAX_RESTARTS:-0}" --local-ranks-filter "$LOG_RANK" -m torchmars.train "$CONFIG_FILE" "$@"
