"""The records of how tables came about, and the digests of code in them."""

import ast
import contextlib
import sys
import threading
from pathlib import Path

import pytest

from fedjax_inv_experiments.experiment import config
from fedjax_inv_experiments.reporting import origin
from fedjax_inv_experiments.running import sources

CODE = '"""About."""\nimport os\n\n\ndef f(x):\n    """Doubles."""\n    return 2 * x\n'


def digest(folder: Path, text: str) -> str:
    path = folder / f"{len(list(folder.iterdir()))}.py"  # a new name, as digests are cached
    path.write_text(text)
    return sources.digest(path)


def test_a_digest_changes_with_the_code_and_not_with_its_comments(tmp_path: Path) -> None:
    before = digest(tmp_path, CODE)
    assert len(before) == 32
    for text in (
        CODE.replace("Doubles.", "Twice x.\n\n    A float.\n    "),
        CODE.replace("About.", "Another text."),
        CODE.replace("    return", "    # why\n\n    return"),
    ):
        assert digest(tmp_path, text) == before
    for text in (
        CODE.replace("2 * x", "3 * x"),
        CODE.replace("    return", "    x = '# no comment'\n    return"),
        CODE.replace("import os", "import sys"),
        'class A: "About."; x = 1\n',
    ):
        assert digest(tmp_path, text) != before
    one, two = (digest(tmp_path, f'class A: "About."; x = {x}\n') for x in (1, 2))
    assert one != two


CHECKED = """
def f(x, found):
    checks.integer("x", x)
    if x > 3:
        text = "large"
        raise ValueError(f"x is {text}")
    elif x < 1:
        raise ValueError("x is small")
    for name in found:
        if name == "x":
            raise ValueError("x is taken")
    if x == 2:
        x = 3
    else:
        raise ValueError("x is odd")
    if (y := g(x)) is None:
        raise ValueError("y is missing")
    return x + y
"""


def test_a_digest_leaves_out_what_only_raises_an_error(tmp_path: Path) -> None:
    before = digest(tmp_path, CHECKED)
    first, loop = CHECKED.index("    checks"), CHECKED.index("    for")
    second = CHECKED.index("    if x == 2")
    for text in (
        CHECKED.replace("large", "above 3").replace("x > 3", "x >= 4"),
        CHECKED.replace('"x is odd"', '"x must be even", x'),
        CHECKED[:first] + CHECKED[second:],
        CHECKED[:loop] + "    if not found:\n        raise KeyError(x)\n" + CHECKED[second:],
    ):
        assert digest(tmp_path, text) == before
    for text in (
        CHECKED.replace("x == 2", "x == 4"),
        CHECKED.replace('text = "large"', "return 3"),
        CHECKED.replace(
            'raise ValueError("x is taken")', 'break\n            raise ValueError("")'
        ),
        CHECKED.replace("x = 3", "x = 5"),
        CHECKED.replace("y := g(x)", "y := h(x)"),
        CHECKED.replace("checks.integer", "f = checks.integer"),
        CHECKED.replace('raise ValueError("x is taken")', "found = []"),
        CHECKED.replace('raise ValueError("x is small")', "x = 1"),
    ):
        assert digest(tmp_path, text) != before


def test_the_files_that_a_module_depends_on() -> None:
    found = sources.of_modules(["fedjax_inv.algorithms.fedprox"])
    assert {f"fedjax_inv/{name}.py" for name in ("averaging", "algorithms/fedprox", "local")} <= {
        *found
    }
    assert "fedjax_inv/algorithms/fedipg.py" not in found
    assert not [name for name in found if "experiments" in name]
    alone = sources.of_modules(["fedjax_inv_experiments.papers.cafe"])
    of_papers = [name for name in alone if "experiments" in name]
    assert of_papers == ["fedjax_inv_experiments/papers/cafe.py"]  # not what all papers share


def test_the_files_that_a_run_depends_on() -> None:
    found = sources.of_run(config.of(environment="rotated"))
    assert {
        *("fedjax_inv/algorithms/fedavg.py", "fedjax_inv/evaluation.py", "fedjax_inv/local.py"),
        *("fedjax_inv/program/one_run.py", "fedjax_inv/rounds.py", "fedjax_inv/schedules.py"),
        *("fedjax_inv/missing.py", "fedjax_inv/data/partitions.py"),
        "fedjax_inv/data/wrong_labels.py",
        *(f"fedjax_inv_experiments/parts/{n}.py" for n in ("network", "objective", "selection")),
        "fedjax_inv_experiments/experiment/assemble.py",
        "fedjax_inv_experiments/parts/environments/rotated.py",
    } <= {*found}
    assert not {"fedjax_inv/algorithms/fedipg.py", "fedjax_inv/data/leaf.py"} & {*found}
    streamed = sources.of_run(config.of(environment="rotated", hold="stream"))
    streaming = {f"fedjax_inv/program/{name}.py" for name in ("kept", "parts", "streams")}
    assert streaming <= {*streamed}
    assert not streaming & {*found}


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("--seeds=0,1", "--seeds=0,1"),
        ("--dataset=/data/mine/x.npz", "--dataset=x.npz"),
        ("--dataset=~/x.csv", "--dataset=x.csv"),
        ("--dataset=../x.csv", "--dataset=x.csv"),
        ("--set=penalty=0.1", "--set=penalty=0.1"),
        ("--nobinarise", "--nobinarise"),
        ("--data_dir=/data", None),
        ("--resume", None),
    ],
)
def test_a_command_names_no_place(word: str, shown: str | None) -> None:
    expected = ["fedjax-inv paper cafe", *([shown] if shown else [])]
    assert origin.command(["paper", "cafe", word]) == " ".join(expected)


def test_starts_that_differ_are_several() -> None:
    merged = origin._merged([{"a": "1", "b": "1"}, {"a": "2", "c": "3"}, {"a": "1"}])
    assert merged == {"a": "several", "b": "1", "c": "3"}
    assert [origin._same(values) for values in (["x", "x"], ["x", "y"], [])] == [
        *("x", "several"),
        None,
    ]


def test_threads_may_read_digests_at_the_same_time() -> None:
    paths = sorted((sources.ROOT / "fedjax_inv" / "data").glob("*.py"))[:4]
    failed, ended = [], threading.Event()

    def parse() -> None:
        while not ended.is_set():
            with contextlib.suppress(SystemError):
                ast.literal_eval("{'shape': (3, 4)}")

    def read() -> None:
        try:
            for path in paths:
                sources._read.__wrapped__(path)  # without its cache
        except SystemError as error:
            failed.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        other = threading.Thread(target=parse)
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in (other, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        ended.set()
        other.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed
