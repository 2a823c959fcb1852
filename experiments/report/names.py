"""The methods' names, for figures and papers."""

import re

# By their files. New ones come last, so that all keep their colours.
METHODS = {
    "fedavg": "FedAvg",
    "fedipg": "FedIPG",
    "fl_games": "FL Games",
    "fedcfa": "FedCFA",
    "cafe": "CAFE",
    "scaffold": "SCAFFOLD",
    "feddyn": "FedDyn",
    "fedprox": "FedProx",
    "vrex": "V-REx",
    "fediir": "FedIIR",
    "erm": "ERM",
    "fednova": "FedNova",
    "afl": "AFL",
    "qfedavg": "q-FedAvg",
    "fedgma": "FedGMA",
    "fedomg": "FedOMG",
    "feddg_ga": "FedDG-GA",
    "fedsr": "FedSR",
    "fedmix": "FedMix",
    "moon": "MOON",
    "fedproto": "FedProto",
    "fedpvr": "FedPVR",
    "exit_strategy": "exit strategy",
    "ditto": "Ditto",
    "fedbn": "FedBN",
    "fedsam": "FedSAM",
    "irm": "IRM",
    "vrex_domains": "V-REx inside",
    "group_dro": "GroupDRO",
    "coral": "CORAL",
    "mmd": "MMD",
    "fish": "Fish",
    "fishr": "Fishr",
}


def named(label: str) -> str:
    """A label of a run that begins with an algorithm's file, with the method's name in its place.

    "fedipg penalty_on=classifier" is "FedIPG penalty_on=classifier".
    """
    return re.sub("^[a-z_]+", lambda word: METHODS.get(word[0], word[0]), label)
