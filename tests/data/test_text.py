"""Texts: words, vocabularies of training text alone, Sentiment140, and training on it."""

import csv
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slow
from fedjax_inv import local, models
from fedjax_inv.algorithms import fedcfa, fedmix
from fedjax_inv.checks import UsageError
from fedjax_inv.data import sources, text
from fedjax_inv.types import Algorithm, Setup, Tree
from fedjax_inv_experiments import config
from runs import ran

GOOD, BAD = ("love", "sunny", "great"), ("hate", "rain", "awful")


def tweets(number: int = 60, seed: int = 0) -> list[list[str]]:
    """Rows of Sentiment140 by seven users, whose label a word tells."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(number):
        label = index % 2
        word = rng.choice(GOOD if label else BAD)
        said = f"I {word} it, {'so ' * rng.integers(4)}word{index} &amp; you!"
        rows.append(
            [str(4 * label), str(1000 + index), "Mon", "NO_QUERY", f"u{rng.integers(7)}", said]
        )
    return rows


def written(path: Path, rows: list[list[str]], encoding: str = "latin-1") -> Path:
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    return path


def tweets_of(path: Path) -> str:
    """The name of the data set."""
    return f"sentiment140:{path}"


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ("", []),
        ("  \t\n", []),
        ("I LOVE it!!", ["i", "love", "it", "!", "!"]),
        ("don't, 'quoted' rock'n'roll", ["don't", ",", "'", "quoted", "'", "rock'n'roll"]),
        ("@user_1 at 9pm :-)", ["@", "user", "_", "1", "at", "9pm", ":", "-", ")"]),
        ("Café\u00a0naïve", ["café", "naïve"]),
        ("<unknown>", ["<", "unknown", ">"]),
    ],
)
def test_tokens(said: str, tokens: list[str]) -> None:
    assert text.tokenize(said) == tokens


def test_the_most_frequent_words_are_told_apart() -> None:
    texts = [["b", "a", "c"], ["c", "b"], ["c", "d"]]
    words = text.vocabulary(texts, 5)
    assert words == (*text.SPECIAL, "c", "b", "a")  # a before d, which is as frequent
    assert text.vocabulary(texts, 99) == (*text.SPECIAL, "c", "b", "a", "d")
    x = text.encode([["d", "c", "a", "b"], ["b"], []], words, 3)
    np.testing.assert_array_equal(x, [[1, 2, 4], [3, 0, 0], [0, 0, 0]])
    assert x.dtype == np.int32


def test_sentiment140(tmp_path: Path) -> None:
    rows = tweets()
    dataset = sources.load(tweets_of(written(tmp_path / "some.csv", rows)), text_length=8)
    assert dataset.classes == ("negative", "positive")
    np.testing.assert_array_equal(dataset.y, np.arange(60) % 2)
    assert dataset.x.shape == (60, 8)
    for row, said, is_test in zip(dataset.x, rows, dataset.test, strict=True):
        told = [dataset.words[word] for word in row if word]
        tokens = text.tokenize(said[5].replace("&amp;", "&"))[:8]
        known = [token if token in dataset.words else "<unknown>" for token in tokens]
        assert told == known
        assert is_test or "<unknown>" not in told
    assert dataset.user is not None
    users = [row[4] for row in rows]
    same = np.array(users)[:, None] == np.array(users)
    np.testing.assert_array_equal(dataset.user[:, None] == dataset.user, same)


def test_the_vocabulary_is_of_training_text_alone(tmp_path: Path) -> None:
    """Whatever the tested tweets say, the words that are told apart stay the same."""
    rows, path = tweets(), tmp_path / "some.csv"
    before = sources.load(tweets_of(written(path, rows)))
    assert before.test.sum() == 6
    for row in np.flatnonzero(before.test):
        rows[row][5] = "never seen before, never, never"
    after = sources.load(tweets_of(written(path, rows)))
    np.testing.assert_array_equal(after.test, before.test)
    assert after.words == before.words
    train = [
        text.tokenize(row[5].replace("&amp;", "&"))
        for row, is_test in zip(rows, before.test, strict=True)
        if not is_test
    ]
    assert set(after.words) == {*text.SPECIAL, *(token for tokens in train for token in tokens)}
    few = sources.load(tweets_of(path), vocabulary=5)
    counts = Counter(token for tokens in train for token in tokens)
    kept = [counts.pop(word) for word in few.words[2:]]
    assert len(kept) == 3
    assert min(kept) >= max(counts.values())


def test_the_split_is_of_ids_and_the_order_of_rows_is_nothing(tmp_path: Path) -> None:
    rows = tweets()
    for row in rows[::3]:
        row[1] = "7"  # one tweet with many labels stays in one split
    first = sources.load(tweets_of(written(tmp_path / "a.csv", rows)))
    assert len(set(first.test[::3])) == 1
    turned = sources.load(tweets_of(written(tmp_path / "b.csv", rows[::-1])))
    np.testing.assert_array_equal(turned.test[::-1], first.test)
    np.testing.assert_array_equal(turned.x[::-1], first.x)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_encodings(encoding: str, tmp_path: Path) -> None:
    rows = tweets(20)
    for row in rows:
        row[5] = "naïve caf\u00e9\u0085 yes"  # a control sign that ends a line elsewhere
    dataset = sources.load(tweets_of(written(tmp_path / "some.csv", rows, encoding)))
    assert {"naïve", "café", "yes"} <= set(dataset.words)


# The binaries.


def flags(path: Path, **changes: Any) -> dict[str, Any]:
    return dict(dataset=tweets_of(path), model="lstm", partition="user", clients=3) | changes


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("data") / "sent140.csv", tweets())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    slow.after(1, [("fedavg", ()), ("fedmix", ()), ("fedcfa", ("top_k=2", "rows=2"))]),
)
def test_texts_are_learned(
    algorithm: str, settings: tuple[str, ...], path: Path, tmp_path: Path
) -> None:
    chosen = dict(
        **dict(algorithm=(algorithm,), set=settings, widths=(4,), text_length=6),
        **dict(optimizer="adam", learning_rate=(0.02,), local_epochs=2, rounds=12, eval_every=6),
        run_dir=str(tmp_path / "run"),
    )
    (run,) = ran(config.of(**flags(path, **chosen))).runs
    assert run["last"]["test_score"] > 0.8
    assert run["last"]["train_loss"] < 0.4


@pytest.mark.parametrize("factory", [fedmix.fedmix, fedcfa.fedcfa])
def test_words_have_no_mean_unless_inputs_makes_something_of_them(
    factory: Callable[..., Algorithm],
) -> None:
    x, key = jnp.ones((1, 4), jnp.int32), jax.random.key(0)
    model = models.lstm(2, vocabulary=5, widths=(3,))
    work = local.epochs(optax.sgd(0.1), batch_size=4, num_epochs=1)
    some = {"top_k": 1} if factory is fedcfa.fedcfa else {}

    def shapes(**settings: Any) -> Tree:
        made = factory(model, work, **some, **settings)
        setup = Setup(model.init(key, x), 2, x, key, jnp.ones(2, bool))
        return jax.eval_shape(lambda: made.init_server(setup).side)

    assert (4, 5) in [leaf.shape[-2:] for leaf in jax.tree.leaves(shapes(mixable=model.mixable))]
    with pytest.raises(UsageError, match="inputs"):
        shapes()
