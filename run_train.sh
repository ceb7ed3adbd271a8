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
#   NNODES=2:4 sbatch --no-kill --nodes=4 --gpus-per-node=8 run_train.sh [--section.key value ...]
#   NNODES=2:4 RDZV_ENDPOINT=login-node:29400 sbatch --array=0-3 --nodes=1 --gpus-per-node=8 \
#       run_train.sh [--section.key value ...]
#
#   CONFIG_FILE    the config, or several, of which the later ones win: "gpt2_small.toml my.toml".
#                  One that is no file here is taken from train_configs, or is the name of a preset
#                  (torchmars presets; default: quickstart.toml)
#   NGPU           ranks to start on each machine (default: one for each GPU; 2 without GPUs)
#   LOG_RANK       ranks of each machine whose output is shown, separated by commas (default: 0)
#   MAX_RESTARTS   times that all ranks are started again, from the newest checkpoint, after one has
#                  died and the run has made no progress since the last time (default: 0)
#   NNODES         machines, or MIN:MAX of them as in 2:4, between which they may change while the
#                  run goes on (default: the job's; 1 outside of one)
#   NODE_RANK      number of this machine, 0 for the one that RDZV_ENDPOINT names (default, and in
#                  a job: found out)
#   RDZV_ENDPOINT  HOST:PORT of the rendezvous, HOST being one of the machines, or where `torchmars
#                  rendezvous` runs (default in a job that is in no array: its first node, where the
#                  job starts that command at a port of its own)
#   RDZV_TOKEN     secret of the machines, the same on all, without which nobody joins them
#                  (default: none; in a job, one that it makes)
#   RDZV_TIMEOUT   seconds that machines and ranks wait for each other at the start (default: 45,
#                  and half a second for each rank, but at most 600)
#   LOST_SECONDS   seconds of silence after which a machine is lost: the others stop their ranks and
#                  wait RDZV_TIMEOUT for it, or another one in its place (default: 8 up to 32
#                  machines, then 2 + 3 x machines / 16; 0: never)
#   JOIN_SECONDS   seconds from a change of the machines until those that come are taken in
#                  (default: 60)
#
# Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 save the run and end it. The same command resumes, and a SLURM
# job puts itself back into the queue. Exit codes: 0 complete; 2 a mistake in the config or the
# data; 69 not all ranks connected in time, or a machine was lost; 70 a rank hung; 75 stopped by a
# signal and saved; 128 + n ended by signal n; else a crash.
set -euo pipefail

places=("$(dirname "$0")")
batch=false
elastic=false
array=""  # the number of that whose jobs are the machines of one run
if [ -n "${SLURM_JOB_ID:-}" ] && [ "${ENVIRONMENT:-}" = BATCH ]; then
    batch=true
    job=$SLURM_JOB_ID
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then  # the number alone may be that of the whole array
        job=${SLURM_ARRAY_JOB_ID:-}_$SLURM_ARRAY_TASK_ID
        if [[ $(scontrol show job "$job" || true) != *"JobId=$SLURM_JOB_ID "* ]]; then
            unset "${!SLURM_ARRAY_@}"  # of the job that has submitted this one
            job=$SLURM_JOB_ID
        fi
    fi
    # $0 is a copy that SLURM made; the job knows the script, and its arguments on the same line.
    script=$(scontrol show job "$job" | sed -n 's/^ *Command=//p' || true)
    places+=("${script%%/run_train.sh*}" "$SLURM_SUBMIT_DIR")
    if [[ ${NNODES:-} == *:* ]]; then
        elastic=true
        array=${SLURM_ARRAY_JOB_ID:-}
    fi
    # The nodes of one job meet at the first one, at a port to be found.
    if [ -z "$array" ] && [ -z "${RDZV_ENDPOINT+set}" ]; then
        export RDZV_ENDPOINT TORCHMARS_JOB_ENDPOINT
        nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        RDZV_ENDPOINT=${nodes%%$'\n'*}:20000
        TORCHMARS_JOB_ENDPOINT=$RDZV_ENDPOINT
    fi
    if [ -z "$array" ]; then
        export RDZV_TOKEN=${RDZV_TOKEN-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
    fi
fi
export PYTHONSAFEPATH=1  # no module of the current folder is taken for one of Python's
named=:${PYTHONPATH:-}:
while [[ $named == *::* ]]; do  # an empty part of it is that folder too
    named=${named//::/:}
done
named=${named#:}
paths=("${named%:}")
for root in "${places[@]}"; do
    if [ -e "$root/torchmars/__init__.py" ]; then  # the repository, which may not be installed
        root=$(cd "$root" && pwd)
        paths+=("$root${named:+:${named%:}}")
        break
    fi
done
trap 'exit 130' INT  # also where Python is about to end well
has='import sys, torchmars; from importlib.util import find_spec; sys.exit(not find_spec("torch"))'
for PYTHONPATH in "${paths[@]}"; do
    export PYTHONPATH
    for python in python python3 "$root/.venv/bin/python" ""; do
        if [ -n "$python" ] && "$python" -c "$has" 2>/dev/null; then
            break 2
        fi
    done
done
if [ -z "$python" ]; then
    problem="there is no python on the PATH: install one"
    if command -v python || command -v python3; then
        problem="no Python here has torchmars: install it"
        if [ "${#paths[@]}" -eq 2 ]; then
            problem="no Python here has torchmars: python3 -m venv $root/.venv &&"
            problem+=" $root/.venv/bin/pip install -e $root -c $root/constraints.txt makes one that"
            problem+=" this script finds"
        fi
    fi > /dev/null
    echo "error: $problem, or activate the environment that has torchmars" >&2
    exit 2
fi
trap - INT
files=("${CONFIG_FILE-quickstart.toml}")
if [ ! -e "${files[0]}" ]; then  # several names, unless it is one with spaces
    set -f
    read -r -d '' -a files <<< "${files[0]}" || true
    set +f
fi
set -- "${files[@]:-}" "$@"
if [ "$batch" = false ]; then
    exec "$python" -m torchmars train "$@"
fi

# Data and checkpoints are checked once. Then there is one launcher on each node of the job, and its
# ranks on all CPUs that the job has there. All of them get the arguments of this script.
"$python" -m torchmars train --prepare "$@"
if [ -n "$array" ] && "$python" -m torchmars train --complete "$@"; then
    exit 0  # the others have ended while this job was in the queue
fi
if [ "${TORCHMARS_JOB_ENDPOINT:-}" = "$RDZV_ENDPOINT" ]; then  # this is the first node
    port="from torchmars.cluster.ports import job_port; print(job_port($SLURM_JOB_ID))"
    port=$("$python" -c "$port")
    RDZV_ENDPOINT=${RDZV_ENDPOINT%:*}:$port
    TORCHMARS_JOB_ENDPOINT=$RDZV_ENDPOINT
fi
nodes=${NNODES:-$SLURM_JOB_NUM_NODES}
no_kill=""
if [ "$elastic" = true ]; then
    nodes=$SLURM_JOB_NUM_NODES
fi
if [ "$elastic" = true ] && [ -z "$array" ]; then  # the step goes on without nodes that are lost
    no_kill=--no-kill
    if [ -z "${SBATCH_NO_KILL+set}" ]; then  # SLURM tells nobody of the option itself
        echo "warning   a lost node ends this job, unless you gave sbatch the option --no-kill" >&2
    fi
fi
SECONDS=0
code=0
if [ "${TORCHMARS_JOB_ENDPOINT:-}" = "$RDZV_ENDPOINT" ] && [ "$nodes" -gt 1 ]; then
    # It ends with this script: the launchers, which save on a signal, have to meet until then.
    exec {ready}< <(trap '' TERM USR1; exec "$python" -m torchmars rendezvous "$RDZV_ENDPOINT")
    store=$!
    trap 'kill -KILL "$store" 2>/dev/null || true' EXIT
    read -r <&"$ready" || { wait "$store" && code=1 || code=$?; }  # it has said why
fi
if [ "$code" -eq 0 ]; then
    unset NODE_RANK
    srun --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 \
        $no_kill "$python" -m torchmars train --prepared "$@" &
    step=$!
    trap 'kill -USR1 "$step" || true' USR1 TERM
    while kill -0 "$step" 2>/dev/null; do  # a signal ends a wait early
        wait "$step" || true
    done
    wait "$step" || code=$?  # bash keeps the code of a step that ended before it is asked for it
fi
# The code of srun is the highest of all: that of a launcher which was killed, or cut off.
if [ "$elastic" = true ] && [ "$code" -ne 0 ] && "$python" -m torchmars train --complete "$@"; then
    code=0
fi

# Back into the queue, unless the run is complete or mistaken, the job was cancelled, or it has
# failed at once twice in a row.
state=$(scontrol show job "$job" | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p')
again=false
if [ "$state" = RUNNING ] && [ "$code" -eq 75 ]; then
    again=true
    scontrol update JobId="$job" Comment="torchmars: stopped" || true
elif [ "$state" = RUNNING ] && [ "$code" -ne 0 ] && [ "$code" -ne 2 ]; then
    failed="failed at once"
    # Many ranks wait longer than that for each other before they give up (69).
    [ "$SECONDS" -lt "$([ "$code" -eq 69 ] && echo 1800 || echo 300)" ] || failed="failed"
    if [ -n "$array" ] && [ "$code" -eq 69 ]; then  # the others may still be in the queue
        failed="failed"
    fi
    again=true
    if [ "$failed" = "failed at once" ] && scontrol show job "$job" |
            grep -q "Comment=torchmars: failed at once"; then
        again=false
        echo "error: the run failed at once twice in a row (exit code $code):" \
            "it is not put back into the queue" >&2
    fi
    scontrol update JobId="$job" Comment="torchmars: $failed" || true
fi
if [ "$again" = true ]; then
    echo "the run is not complete (exit code $code): the job goes back into the queue"
    scontrol requeue "$job"
    if [ -n "$no_kill" ]; then  # with as many nodes as it had
        scontrol update JobId="$job" NumNodes="$SLURM_JOB_NUM_NODES" || true
    fi
fi
exit "$code"
