#!/usr/bin/env bash
# One virtual environment for each simulator that benchmarks/peers.py runs beside ours.
# None of them is a dependency of the project, and none shares an environment with another.
#
#   benchmarks/peers/make_venvs.sh FOLDER [pytorch|pfl|flower ...]
#
# Makes FOLDER/pytorch, FOLDER/pfl, ... (all by default; again is harmless), for
# `python -m benchmarks.peers --venvs=FOLDER`. Goes on when one cannot be made.
#
# PYTHON  the interpreter, 3.11 by default
# TORCH   the requirement installed first into every environment, so that a peer's own requirement
#         of torch is met by it. A build for your GPU driver: TORCH=torch==2.13.0+cu130, say, with
#         pip told where such builds are.
set -u

PYTHON=${PYTHON:-python3.11}
TORCH=${TORCH:-torch==2.13.0}
[ $# -ge 1 ] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
folder=$1
shift
[ $# -ge 1 ] || set -- pytorch pfl flower

requirements() {
  case $1 in
    pytorch) echo numpy ;;
    pfl) echo pfl==0.6.0 ;;
    flower) echo 'flwr[simulation]==1.41.0' ;;
    *) return 1 ;;
  esac
}

make_one() {
  local venv=$2 wanted
  wanted=$(requirements "$1") && "$PYTHON" -m venv "$venv" &&
    "$venv/bin/pip" install --quiet "$TORCH" && "$venv/bin/pip" install --quiet "$TORCH" $wanted
}

failed=''
for peer in "$@"; do
  if make_one "$peer" "$folder/$peer"; then
    echo "$folder/$peer"
  else
    echo "$folder/$peer: FAILED" >&2
    failed="$failed $peer"
  fi
done
[ -z "$failed" ]
