"""FL Games on plain arrays: best responses as a scanned loop over turns.

Three players fit softmax regressions to their own digits. In each turn one of them, in order,
responds to the others' actions.

python examples/best_responses.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from fedjax_inv.algorithms import fl_games
from fedjax_inv.types import Array

NUM_PLAYERS, NUM_TURNS = 3, 60


def play(x: Array, y: Array, num_turns: int, optimizer: optax.GradientTransformation) -> Array:
    """Return the players' actions [C, D, K] after the turns. x: [C, B, D]. y: [C, B]."""
    actions = jnp.zeros((len(x), x.shape[-1], 10))
    mask = jnp.ones(y.shape[1], bool)

    def turn(state: tuple, number: Array) -> tuple:
        actions, opt_states = state
        player = number % len(x)
        others = (player + 1 + jnp.arange(len(x) - 1)) % len(x)
        own_state = jax.tree.map(lambda leaf: leaf[player], opt_states)
        action, own_state = fl_games.best_response(
            lambda action: x[player] @ action,
            actions[player],
            own_state,
            actions[others],
            y[player],
            mask,
            optimizer=optimizer,
            num_steps=2,
        )
        opt_states = jax.tree.map(lambda all, one: all.at[player].set(one), opt_states, own_state)
        return (actions.at[player].set(action), opt_states), None

    start = actions, jax.vmap(optimizer.init)(actions)
    (actions, _), _ = jax.lax.scan(turn, start, jnp.arange(num_turns))
    return actions


def main() -> float:
    """Play on digits; return the held-out accuracy of the ensemble."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    train = x[:1500].reshape(NUM_PLAYERS, 500, -1), y[:1500].reshape(NUM_PLAYERS, 500)
    actions = play(*map(jnp.asarray, train), NUM_TURNS, optax.sgd(1.0, momentum=0.9))
    accuracy = float((np.argmax(x[1500:] @ actions.mean(0), 1) == y[1500:]).mean())
    print(f"held-out accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
