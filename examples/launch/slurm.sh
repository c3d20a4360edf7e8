#!/usr/bin/env bash
#SBATCH --job-name=lit_efficient
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
# Train under SLURM, one task a GPU, and queue again where the time is over, a node fails or the job is preempted:
#
#   sbatch examples/launch/slurm.sh -c llm/pretrain -c scale/two_nodes
#
# Two minutes before the end each task gets SIGUSR1: the run saves within one step and ends with 128 + 10; after SIGTERM
# with 128 + 15. The job that SLURM starts again goes on in its own run's folder, from its last checkpoint,
# RESTARTS (20) times at most.
# `python -m lit_efficient check -c ... --devices 8 --nodes 2` says before what would not work.
set -uo pipefail
# SLURM 22.05 to 23.02 give a task one processor, whatever the job asks for, where srun does not say it again.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" python -m lit_efficient fit "$@" -c scale/slurm
code=$?
# Where one task fails srun ends the others by SIGTERM, and may say 143 of that, too: so there is an end to it.
if { [ "$code" = 138 ] || [ "$code" = 143 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt "${RESTARTS:-20}" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
