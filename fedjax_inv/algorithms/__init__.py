"""One algorithm per file: its kernels, and a factory with the file's name.

`from fedjax_inv.algorithms import fedipg` gives the kernels (`fedipg.invariance`) and the factory
(`fedipg.fedipg`). LISTED names the files with an algorithm.
"""

LISTED = (
    "afl",
    "cafe",
    "ditto",
    "erm",
    "exit_strategy",
    "fedavg",
    "fedbn",
    "fedcfa",
    "feddg_ga",
    "feddyn",
    "fedgma",
    "fediir",
    "fedipg",
    "fedmix",
    "fednova",
    "fedproto",
    "fedprox",
    "fedpvr",
    "fedsr",
    "fl_games",
    "moon",
    "qfedavg",
    "scaffold",
    "vrex",
)
