import sys
import textwrap

import jax
import numpy as np
import pytest

import slow
from benchmarks import peers, round_speed, workloads

TINY = {
    name: workloads.shrunk(workload, 20)._replace(num_examples=5, batch_size=2)
    for name, workload in workloads.WORKLOADS.items()
}

RUNNER = textwrap.dedent("""
    import json, sys
    print(json.dumps({"parameters": 7, "versions": {}}), flush=True)
    for line in sys.stdin:
        print("noise of a framework", file=sys.stderr)
        if len(sys.argv) > 1:
            sys.exit("out of luck")
        print(json.dumps({"seconds": 0.5, "steps": 4, "norm": 1.0}), flush=True)
""")


class Clock:
    def __init__(self, *seconds: float) -> None:
        self.seconds = iter(seconds)

    def round(self) -> workloads.Round:
        return workloads.Round(next(self.seconds), 4)


def runner(*arguments: str) -> list[str]:
    return [sys.executable, "-c", RUNNER, *arguments]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow.after(1, sorted(workloads.WORKLOADS, key="b".__ne__)))
def test_a_round_takes_the_steps_that_the_setting_names(name: str) -> None:
    workload = TINY[name]
    engine = workloads.Engine(workload, workloads.Choice(1, "auto"), workloads.noise(workload))
    timed = engine.round()
    assert timed.client_steps == workload.client_steps == 3 * workload.cohort
    assert timed.seconds > 0


def test_client_steps_of_the_settings() -> None:
    steps = {name: workload.client_steps for name, workload in workloads.WORKLOADS.items()}
    assert steps == {"a": 250, "b": 960, "c": 100}


def test_networks_have_the_sizes_of_the_peers() -> None:
    # As the runners' networks in PyTorch have them.
    sizes = {}
    for name, workload in TINY.items():
        model = workloads.model_of(workload, "auto")
        x = jax.ShapeDtypeStruct((1, *workload.shape), np.float32)
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        sizes[name] = sum(leaf.size for leaf in jax.tree.leaves(variables.params))
    assert sizes == {"a": 1626442, "b": 462550, "c": 1663370}


def test_a_step_costs_three_products_a_layer() -> None:
    workload = TINY["b"]
    sizes = 784 * 390, 390 * 390, 390 * 10
    # Forward, and backward for inputs and weights; the images need no gradient.
    products = 2 * workload.batch_size * (3 * sum(sizes) - sizes[0])
    assert 1 <= round_speed.step_flops(workload) / products < 1.5


def test_ratio_is_of_medians_and_above_one_where_ours_is_faster() -> None:
    ratio = peers.ratio_of([4.0, 6.0, 100.0], [2.0, 2.0, 3.0])
    assert ratio == {"ratio": 3.0, "spread": "2.00-33.33"}


def test_turns_drop_the_warmup() -> None:
    parties = {"theirs": Clock(9, 9, 1, 2), "ours": Clock(9, 9, 3, 4)}
    assert workloads.in_turns(parties, 2, 2, 4) == {"theirs": [1, 2], "ours": [3, 4]}


def test_other_work_is_refused() -> None:
    with pytest.raises(workloads.WrongWork, match="theirs: 4 local steps a round, must be 5"):
        workloads.in_turns({"theirs": Clock(1)}, 0, 1, 5)


def test_peer_answers_round_by_round() -> None:
    with peers.started(runner(), 1, 60) as peer:
        assert peer.num_parameters == 7
        assert [peer.round() for _ in range(3)] == [workloads.Round(0.5, 4)] * 3


def test_failing_peer_reports_why() -> None:
    failing = peers.started(runner("fail"), 1, 60)
    with failing as peer, pytest.raises(peers.PeerError, match="ended: out of luck"):
        peer.round()


def test_missing_environment_is_reported() -> None:
    missing = peers.started(["/nowhere/python"], 1, 60)
    with pytest.raises(peers.PeerError, match=r"no /nowhere/python; see make_venvs.sh"), missing:
        pass


def test_choice_is_parsed() -> None:
    assert peers.parse("5/im2col") == workloads.Choice(5, "im2col")
    assert peers.parse("all/lax").label == "all/lax"
    with pytest.raises(ValueError, match="--ours=5: must be auto, or"):
        peers.parse("5")
