"""Kinds of shift, the columns of the map: each has one number for its severity, and its flags."""

from collections.abc import Callable
from typing import Literal, NamedTuple

# All images upright, and a part of them for the test. Each seed has its own copy of the data, as in
# other kinds of shift, so that their programs have the same shapes and are compiled once.
_WHOLE = ("--environment=rotated", "--angles=0", "--held_out=none")


class Shift(NamedTuple):
    """A way in which clients differ from each other, or from the test."""

    title: str  # the heading of its column
    severities: tuple[float, ...]  # the weakest first
    at: float  # the severity in the map
    flags: Callable[[float], tuple[str, ...]]  # of `train`, at a severity
    domains: Literal["any", "none", "own"] = "any"  # the domains that the data must have
    mixes: Callable[[float], bool] = lambda severity: False  # whether clients hold several domains
    is_unseen: bool = False  # whether the test shows a domain of the data that no client has
    preset: str = ""  # joined last
    by_rule: bool = False  # whether it is shown by rules that compare training domains, too
    note: str = ""  # how to read its accuracies

    def fits(self, *, has_domains: bool) -> bool:
        """Whether it can be made of data that have, or do not have, domains of their own."""
        return self.domains == "any" or (self.domains == "own") == has_domains


def _rotated(degrees: float) -> tuple[str, ...]:
    """Clients hold images at five angles, and the test shows a sixth, by so many degrees beyond."""
    unseen = f"{60 + degrees:g}"
    return ("--environment=rotated", f"--angles=0,15,30,45,60,{unseen}", f"--held_out={unseen}")


def _mixed(separation: float) -> tuple[str, ...]:
    """Each client holds one angle (1), or a part of all (0: all clients alike)."""
    return (*_rotated(30), "--partition=mixed", f"--mixing={1 - separation:g}")


def _labels(skew: float) -> tuple[str, ...]:
    """Clients hold the classes in proportions of their own: 1 / Dirichlet's alpha."""
    return (*_WHOLE, "--partition=dirichlet", f"--alpha={1 / skew:g}", "--min_size=10")


def _tail(imbalance: float) -> tuple[str, ...]:
    """The last class is so many times rarer than the first; half of the clients seldom upload."""
    return (*_labels(3), f"--imbalance={imbalance:g}", "--frequency=0.1")


def _noise(share: float) -> tuple[str, ...]:
    """Of the labels of 4 of 10 clients this part is wrong."""
    wrong = (f"--wrong_labels={share:g}", "--wrong_clients=0.4")
    return ("--environment=none", "--held_out=none", "--partition=iid", *wrong)


def _colour(agreement: float) -> tuple[str, ...]:
    """The colour fits the label in this part of the training images, in the test in 0.1."""
    # Two environments, in which the colour is wrong more and less often.
    flips = ",".join(f"{round(1 - agreement + each, 6):g}" for each in (0.1, -0.1))
    classes = ("--num_classes=2", "--label_noise=0.25")
    return ("--environment=colored", "--nobinarise", f"--flips={flips}", *classes)


def _simpson(paradox: float) -> tuple[str, ...]:
    """Within each client the colour of this part tells the digit, over all clients hardly."""
    return ("--environment=simpson", f"--paradox={paradox:g}", "--held_out=test")


def _quantity(skew: float) -> tuple[str, ...]:
    """Sizes differ by 1 / Dirichlet's alpha, and clients pass over each example once."""
    passes = ("--local_steps=0", "--local_epochs=1")
    return (*_WHOLE, "--partition=quantity", f"--alpha={1 / skew:g}", "--min_size=10", *passes)


# Those whose programs have the same shapes stand side by side, so that few programs are kept.
LISTED: dict[str, Shift] = {
    "rotated": Shift("unseen angle", (5, 15, 30, 45), 30, _rotated, domains="none", by_rule=True),
    "unseen": Shift(
        "unseen domain", (1,), 1, lambda at: (), domains="own", is_unseen=True, by_rule=True
    ),
    "mixed": Shift(
        "mixed domains",
        (0, 0.5, 0.9, 1),
        0.5,
        _mixed,
        mixes=lambda severity: severity < 1,
        is_unseen=True,
        by_rule=True,
    ),
    "labels": Shift("label skew", (1, 3, 10), 10, _labels),
    "tail": Shift("long tail, rare uploads", (1, 5, 20), 20, _tail),
    "noise": Shift("wrong labels", (0.2, 0.5, 0.8), 0.8, _noise),
    "colour": Shift(
        "misleading colour",
        (0.55, 0.7, 0.8, 0.9),
        0.8,
        _colour,
        domains="none",
        preset=",map_colour",
        by_rule=True,
        note="75 is optimal; more follows the colour in reverse",
    ),
    "simpson": Shift("Simpson's paradox", (0.5, 0.8, 1), 1, _simpson, domains="none"),
    "quantity": Shift("quantity skew", (0.3, 1, 3), 3, _quantity),
}
