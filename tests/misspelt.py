"""What mypy must refuse: a field that no group has, and a value of another type (test_config)."""

from dataclasses import replace

from experiments.config import Config, Training


def misspelt(config: Config) -> int:
    return config.training.ruonds  # "Training" has no attribute "ruonds"


def of_another_type(config: Config) -> str:
    name: str = config.training.rounds  # has type "int", variable has type "str"
    return name


def replaced(training: Training) -> Training:
    return replace(training, rounds="many", schedule="cosinus")
