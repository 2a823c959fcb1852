#!/bin/sh
# Four processes on two nodes share the runs of a command: sbatch examples/slurm.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
# srun does not take the number of cores from sbatch.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-8}" \
    .venv/bin/fedjax-inv train --processes=auto --seeds=0,1,2,3 "$@"
