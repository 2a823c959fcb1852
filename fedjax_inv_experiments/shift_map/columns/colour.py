"""A misleading colour: it predicts the label in training, and the opposite label in the test."""

from fedjax_inv_experiments.shift_map.columns.kind import Shift


def _flags(agreement: float) -> tuple[str, ...]:
    # Two environments, in which the colour is wrong a little more and a little less often.
    flips = ",".join(f"{round(1 - agreement + each, 6):g}" for each in (0.05, -0.05))
    classes = ("--num_classes=2", "--label_noise=0.25")
    return ("--environment=colored", "--nobinarise", f"--flips={flips}", *classes)


SHIFT = Shift(
    "misleading colour",
    "part of the training images whose colour fits the label; in the test 0.1",
    (0.55, 0.7, 0.85, 0.95),
    0.85,
    _flags,
    domains="none",
)
