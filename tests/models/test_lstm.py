"""The LSTM against its equations in NumPy, in float64; padding; mixtures of words."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from federations import assert_close
from fedjax_inv import models, objectives
from fedjax_inv.algorithms.fedmix import mixed_loss
from fedjax_inv.types import Array, Model, Tree, Variables
from formulas import randomised

VOCABULARY, DEPTH, WIDTHS, CLASSES = 9, 3, (5, 4), 3
MODEL = models.lstm(CLASSES, vocabulary=VOCABULARY, embedding=DEPTH, widths=WIDTHS)
TEXTS = [[3], [4, 1, 2, 8, 3], [7, 7], [5, 2, 1]]
# Words of mixed lengths; in the last one padding also stands before and between them.
X = np.array([[3, 0, 0, 0, 0], [4, 1, 2, 8, 3], [7, 7, 0, 0, 0], [0, 5, 0, 2, 1]], np.int32)
VARIABLES = randomised(MODEL, X)


@partial(jax.jit, static_argnums=0)
def logits(model: Model, variables: Variables, x: Tree) -> Array:
    return models.predict(model, variables, x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def by_numpy(variables: Variables, vectors: np.ndarray) -> np.ndarray:
    """Logits [K] of one text, vectors [T, D] without padding, a step and a layer at a time."""
    body, head = jax.tree.map(np.float64, variables.params)
    sequence = list(np.float64(vectors))
    for number, width in enumerate(WIDTHS, 1):
        layer = body["blocks_0"][f"layer{number}"]
        hidden, cell, outputs = np.zeros(width), np.zeros(width), []
        for vector in sequence:
            gates = vector @ layer["input"]["kernel"] + layer["input"]["bias"]
            gates += hidden @ layer["recurrent"]
            enter, keep, candidate, leave = np.split(gates, 4)
            cell = sigmoid(keep) * cell + sigmoid(enter) * np.tanh(candidate)
            hidden = sigmoid(leave) * np.tanh(cell)
            outputs.append(hidden)
        sequence = outputs
    classifier = head["blocks_0"]["Dense_0"]
    return sequence[-1] @ classifier["kernel"] + classifier["bias"]


def vectors_of(variables: Variables) -> np.ndarray:
    return variables.params.body["blocks_0"]["embedding"]


def test_it_is_its_formula_and_padding_never_acts() -> None:
    """A text of padding alone has the zero state; weights of words are embedded as mixtures."""
    x = np.concatenate([X, np.zeros((1, 5), np.int32)])
    weights = MODEL.mixable(jnp.asarray(x))
    assert weights.shape == (*x.shape, VOCABULARY)
    np.testing.assert_array_equal(weights.argmax(-1), x)
    mean = weights[1:3].mean(0, keepdims=True)

    table = np.float64(vectors_of(VARIABLES))
    bias = VARIABLES.params.head["blocks_0"]["Dense_0"]["bias"]
    expected = np.stack([*(by_numpy(VARIABLES, table[text]) for text in TEXTS), bias])
    assert_close(logits(MODEL, VARIABLES, x), expected, atol=1e-5)
    table[0] = 0  # padding has no vector
    mixture = by_numpy(VARIABLES, (table[x[1]] + table[x[2]]) / 2)
    mixed = logits(MODEL, VARIABLES, jnp.concatenate([weights, mean]))
    assert_close(mixed, np.stack([*expected, mixture]), atol=1e-5)


def test_gradients_are_the_same_however_much_padding_is_appended() -> None:
    """For words and for their weights."""
    y, mask = jnp.array([0, 1, 2, 0]), jnp.array([True, True, True, False])
    longer = np.pad(X, ((0, 0), (0, 3)))

    @jax.jit
    def gradients(params: Tree) -> list[Tree]:
        def loss(params: Tree, x: Array) -> Array:
            outputs = models.predict(MODEL, VARIABLES._replace(params=params), x)
            return objectives.cross_entropy(outputs, y, mask)

        inputs = X, longer, MODEL.mixable(jnp.asarray(longer))
        return [jax.grad(loss)(params, x) for x in inputs]

    short, *others = gradients(VARIABLES.params)
    for other in others:
        jax.tree.map(partial(assert_close, atol=1e-6), other, short)
    of_vectors = vectors_of(VARIABLES._replace(params=short))
    assert not of_vectors[0].any()
    assert of_vectors[3].any()


def test_mixing_weights_of_words_is_mixing_their_vectors() -> None:
    """FedMix's loss through the words' weights is that of a network that is given the vectors."""
    weights = MODEL.mixable(jnp.asarray(X))
    table = jnp.asarray(vectors_of(VARIABLES)).at[0].set(0)
    of_vectors = models.lstm(CLASSES, vocabulary=DEPTH + 1, embedding=DEPTH, widths=WIDTHS)
    body = VARIABLES.params.body["blocks_0"] | {"embedding": jnp.eye(DEPTH + 1)[:, 1:]}
    given = VARIABLES._replace(params=VARIABLES.params._replace(body={"blocks_0": body}))
    labels = jax.nn.one_hot(jnp.array([0, 1, 2, 0]), CLASSES)

    def loss(model: Model, variables: Variables, x: Array) -> Array:
        def risk(x: Array, y: Array) -> Array:
            outputs = models.predict(model, variables, x)
            return objectives.soft_cross_entropy(outputs, y, jnp.ones(len(x), bool))

        return mixed_loss(risk, x, labels, x.mean(0), labels.mean(0), ratio=0.3)

    vectors = jnp.pad(weights @ table, ((0, 0), (0, 0), (1, 0)))  # nothing on the padding
    both = [(MODEL, VARIABLES, weights), (of_vectors, given, vectors)]
    through_words, through_vectors = (
        jax.jit(loss, static_argnums=0)(*arguments) for arguments in both
    )
    assert_close(through_words, through_vectors, atol=1e-6)


def test_the_body_puts_out_the_last_layers_units() -> None:
    whole = models.lstm(CLASSES, vocabulary=VOCABULARY, embedding=DEPTH, widths=WIDTHS, cut=0)
    mask = jnp.ones(len(X), bool)

    def factors(model: Model) -> Array:
        params, stats = model.init(jax.random.key(0), X)
        return model.encode(params.body, stats.body, X, mask, True)[0]

    assert jax.eval_shape(lambda: factors(MODEL)).shape == (len(X), WIDTHS[-1])
    assert jax.eval_shape(lambda: factors(whole)).shape == X.shape
