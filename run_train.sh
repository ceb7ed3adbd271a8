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
#   CONFIG_FILE    the config, or several, of which the later ones win: "gpt2_small.toml my.toml";
#                  files, files of train_configs, or presets (default: those given, or quickstart)
#   NGPU           ranks to start on each machine (default: one for each GPU; 2 without GPUs)
#   LOG_RANK       ranks of each machine whose output is shown, separated by commas (default: 0)
#   MAX_RESTARTS   restarts of all ranks without progress, after one has died (default: 0)
#   NNODES         machines, or MIN:MAX between which they may change (default: the job's, else 1)
#   NODE_RANK      number of this machine, 0 for that of RDZV_ENDPOINT (default: found out)
#   RDZV_ENDPOINT  HOST:PORT of the rendezvous, HOST being one of the machines, or where `torchmars
#                  rendezvous` runs (default in a job: its first node, where the job starts it)
#   RDZV_TOKEN     secret of the machines, the same on all (default in a job: one that it makes)
#   RDZV_TIMEOUT   seconds to wait for others at the start (default: 45 + ranks / 2, at most 600)
#   LOST_SECONDS   silence after which a machine is lost; 0: never (default: 8 up to 32 machines)
#   JOIN_SECONDS   seconds from a change of the machines until others are taken in (default: 60)
#
# Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 save the run and end it. The same command resumes, and a SLURM
# job puts itself back into the queue. Exit codes: 0 complete; 2 a mistake; 69 not all connected in
# time, or one was lost; 70 a rank hung; 75 stopped and saved; 128 + n by signal n; else a crash.
set -euo pipefail

places=("$(dirname "$0")")
batch=$([ -n "${SLURM_JOB_ID:-}" ] && [ "${ENVIRONMENT:-}" = BATCH ] && echo yes || true)
if [ -n "$batch" ]; then
    job=$SLURM_JOB_ID
    element=${SLURM_ARRAY_JOB_ID:-0}_${SLURM_ARRAY_TASK_ID:-0}  # or that of who has submitted it
    [ "$element" = 0_0 ] ||
        [[ $(scontrol show job "$element" 2>&1 || true) != *"JobId=$job "* ]] || job=$element
    # $0 is a copy that SLURM made; the job knows the script, and its arguments on the same line.
    script=$(scontrol show job "$job" | sed -n 's/^ *Command=//p' || true)
    places+=("${script%%/run_train.sh*}" "$SLURM_SUBMIT_DIR")
fi
for root in "${places[@]}" ""; do  # the repository, which may not be installed
    [ ! -e "$root/torchmars/__init__.py" ] || { root=$(cd "$root" && pwd) && break; }
done
export PYTHONSAFEPATH=1  # no module of the current folder is taken for one of Python's,
shopt -s extglob
named=${PYTHONPATH:-}; named=${named//+(:)/:}; named=${named#:}; named=${named%:}  # no empty part
trap 'exit 130' INT  # also where Python is about to end well
has='import sys, torchmars; from importlib.util import find_spec; sys.exit(not find_spec("torch"))'
for PYTHONPATH in "$named" "${root:+$root${named:+:$named}}"; do
    export PYTHONPATH
    for python in python python3 "${root:-${places[0]}}/.venv/bin/python" ""; do
        [ -z "$python" ] || ! "$python" -c "$has" 2>/dev/null || break 2
    done
done
trap - INT
made="python3 -m venv $root/.venv && $root/.venv/bin/pip install -e $root -c $root/constraints.txt"
[ -n "$python" ] || {
    made="${root:+$made makes one that this script finds, or }install it, or activate the"
    echo "error: no Python here has torchmars: $made environment that has torchmars" >&2 && exit 2
}
files=("${CONFIG_FILE-quickstart.toml}")
[ -e "${files[0]}" ] || read -r -d '' -a files <<< "${files[0]}" || true  # several names
[[ ${CONFIG_FILE+set} == "" && ${1--} != -* ]] || set -- "${files[@]:-}" "$@"
[ -n "$batch" ] || exec "$python" -m torchmars train "$@"

# In a job data and checkpoints are checked once. Then there is one launcher on each node.
own=${RDZV_ENDPOINT-yes}  # the machines meet at the first node, at a port of the job, which is
port=$((20000 + SLURM_JOB_ID % 12000))  # below those that systems give away
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RDZV_ENDPOINT=${RDZV_ENDPOINT-${nodes%%$'\n'*}:$port}
export RDZV_TOKEN=${RDZV_TOKEN-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
"$python" -m torchmars train --prepare "$@"
SECONDS=0 code=0 elastic="" nodes=${NNODES:-$SLURM_JOB_NUM_NODES}
[[ $nodes != *:* ]] || elastic=--no-kill nodes=$SLURM_JOB_NUM_NODES  # without nodes that are lost
[ -z "$elastic" ] || [ -n "${SBATCH_NO_KILL+set}" ] ||
    echo "warning   a lost node ends this job, unless you gave sbatch the option --no-kill" >&2
if [ "$own" = yes ] && [ "$nodes" -gt 1 ]; then  # until the launchers end, which save on a signal
    exec {ready}< <(trap '' TERM USR1; exec "$python" -m torchmars rendezvous "$RDZV_ENDPOINT")
    store=$!
    trap 'kill -KILL "$store" 2>/dev/null || true' EXIT
    read -r <&"$ready" || { wait "$store" && code=1 || code=$?; }  # it has said why
fi
if [ "$code" -eq 0 ]; then
    env -u NODE_RANK srun --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none \
        --kill-on-bad-exit=0 $elastic "$python" -m torchmars train --prepared "$@" &
    step=$!
    trap 'kill -USR1 "$step" || true' USR1 TERM
    while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done  # a signal ends a wait early
    wait "$step" || code=$?  # bash keeps the code of a step that ended before it is asked for it
fi
# The code of srun is the highest of all: that of a launcher which was killed, or cut off.
if [ -n "$elastic" ] && "$python" -m torchmars train --complete "$@"; then code=0; fi
# Back into the queue, unless the run is complete or mistaken, the job was cancelled, or it has
# failed at once twice in a row: many ranks wait longer for each other before they give up (69).
told=$(scontrol show job "$job") how="failed at once"
[[ $code != 0 && $code != 2 && $told == *JobState=RUNNING* ]] || exit "$code"
[ "$SECONDS" -lt $((code == 69 ? 1800 : 300)) ] || how=failed
[ "$code" -ne 75 ] || how=stopped
scontrol update JobId="$job" Comment="torchmars: $how" || true
if [[ $how == *once && $told == *"Comment=torchmars: $how"* ]]; then
    echo "error: the run failed at once twice in a row (exit code $code): the job ends" >&2
else
    echo "the run is not complete (exit code $code): the job goes back into the queue"
    scontrol requeue "$job"
    [ -z "$elastic" ] || scontrol update JobId="$job" NumNodes="$SLURM_JOB_NUM_NODES" || true
fi
exit "$code"
