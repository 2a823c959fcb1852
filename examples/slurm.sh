#!/bin/sh
# Four processes on two nodes share the runs of a sweep: sbatch examples/slurm.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
srun .venv/bin/fedjax-inv sweep --distributed --seeds=0,1,2,3 "$@"
