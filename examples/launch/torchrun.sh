#!/usr/bin/env bash
# Train on all GPUs of this machine, or of several, and begin again from the last checkpoint where a process dies:
#
#   examples/launch/torchrun.sh -c llm/pretrain -c scale/one_node
#   NODES=2 HEAD=host0:29500 JOB=name examples/launch/torchrun.sh -c llm/pretrain -c scale/two_nodes   (on each machine)
#
# DEVICES: processes a machine (8), RESTARTS: how often all of them are started again (3). The run's folder must be on a
# file system that all machines see. ModelCheckpoint's every_n_train_steps says how much a dead process costs; ExactResume
# has the run end with the bits of one that nobody has disturbed.
set -euo pipefail
# Or processes that are started again would read the addresses of those that died, from a store that all attempts share.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "${DEVICES:-8}" --max-restarts "${RESTARTS:-3}" \
  --rdzv-backend c10d --rdzv-endpoint "${HEAD:-localhost:0}" --rdzv-id "${JOB:-lit_efficient}" \
  --module lit_efficient fit "$@" --ckpt_path last
