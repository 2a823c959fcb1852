"""Rotated domains by their flags: a client with an angle of its own."""

import numpy as np
import pytest

from fedjax_inv.data import federation
from fedjax_inv_experiments import config
from fedjax_inv_experiments.assembly import experiment


def holders(**flags: object) -> tuple[list[int], list[int]]:
    """(the domain of each client, how many training examples it has), of a few draws."""
    made = experiment.make(config.of(partition="domain", seeds=(0, 1, 2), **flags))
    (splits,) = made.splits.values()
    for split in splits.values():
        rows = federation.parts_of(split.train)
        of_first_draw = split is splits[0]
        for client, domain in enumerate(split.domain) if of_first_draw else ():
            assert set(made.dataset.domain[rows[client]]) == {domain}
    num_odd = len(made.config.environment.odd_angles)
    first, *others = ([int(domain) for domain in split.domain] for split in splits.values())
    # Regular domains may have a client more or less, as each seed draws its test.
    for other in others:
        assert [domain < num_odd for domain in other] == [domain < num_odd for domain in first]
    return first, np.asarray(splits[0].train.size).tolist()


@pytest.mark.parametrize(("num_clients", "held_out"), [(7, "none"), (20, "75")])
def test_the_first_client_alone_holds_the_odd_angle(num_clients: int, held_out: str) -> None:
    flags = dict(clients=num_clients, held_out=held_out)
    domains, sizes = holders(odd_angles=(135.0,), **flags)
    assert domains.count(0) == 1
    assert domains[0] == 0
    num_regular = 6 - (held_out != "none")
    assert set(domains[1:]) == set(range(1, num_regular + 1))
    if num_clients == 20:  # it has about as much as the others
        assert max(sizes) / sizes[0] < 1.2
        assert min(sizes) / sizes[0] > 0.7


def test_without_that_client_the_odd_domain_is_the_test() -> None:
    made = experiment.make(config.of(odd_angles=(135.0,), clients=19, held_out="135"))
    (split,) = made.splits["135"].values()
    assert set(split.domain) == {1, 2, 3, 4, 5, 6}
    (rows,) = federation.parts_of(split.test)
    np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(made.dataset.domain == 0))
    assert abs(len(rows) - 0.05 * len(made.dataset.y)) <= 1


def test_several_odd_angles_have_a_client_each() -> None:
    domains, _ = holders(odd_angles=(180.0, 135.0), clients=20, held_out="none")
    assert domains[:2] == [0, 1]
    assert min(domains[2:]) == 2
    assert experiment.make(
        config.of(odd_angles=(180.0, 135.0), angles=(0.0, 30.0), clients=4)
    ).dataset.domains == ("180", "135", "0", "30")
