"""One algorithm per file: its kernels, and a factory with the file's name.

`from fedjax_inv.algorithms import fedipg` gives the kernels (`fedipg.invariance`) and the factory
(`fedipg.fedipg`). LISTED names the files with an algorithm.

All factories take a `model`, the network; `work`, local training; and most of them `loss`, its
objective; `server_optimizer`, the server's optimizer, on the mean delta; `weighting`, how much a
client counts in that mean ("size", "uniform", "age" (`aggregators.by_age`) or a function of
`Slots`); `num_domains`, D, how many domains the data have; and `loss_batch_size`, the examples at
once in a pass for a mean loss, which changes only time and memory. A factory describes those that
mean more, and its own arguments.
"""

LISTED = (
    "afl",
    "cafe",
    "coral",
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
    "fedomg",
    "fedproto",
    "fedprox",
    "fedpvr",
    "fedsam",
    "fedsr",
    "fish",
    "fishr",
    "fl_games",
    "group_dro",
    "irm",
    "mmd",
    "moon",
    "qfedavg",
    "scaffold",
    "vrex",
    "vrex_domains",
)
