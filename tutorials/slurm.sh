#!/usr/bin/env bash
#SBATCH --job-name=zoo --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8
#SBATCH --time=24:00:00 --signal=TERM@300 --requeue --open-mode=append
# A template: one task a GPU; Lightning reads ranks and the address from SLURM. Saved five minutes before the end of the
# time, and continued when the job is requeued. All nodes must see the same runs/,
# and the same home or XDG_CONFIG_HOME: a key there tells that the run is yours (elsewhere, add --trust to --resume).
run=runs/big
if [ -f "$run/checkpoints/last.ckpt" ]; then
  what=(--resume "$run")
else
  what=(--config gdn_h2.yaml --config recipe/1.5b.yaml --config train/ddp.yaml --run big)
fi
srun --kill-on-bad-exit=1 python cli.py fit "${what[@]}" --trainer.num_nodes="$SLURM_NNODES" --trainer.devices=8 \
  --checkpoints.every_n_minutes=30
code=$?
# 124: it hung; 143: it was told to stop. Both have left a checkpoint.
case $code in 124 | 143) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit $code
