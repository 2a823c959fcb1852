"""Save a trained state, load it again, and evaluate it on each client.

python examples/load_and_evaluate.py
"""

import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

from fedjax_inv import devices, evaluation, local, models, rounds, schedules
from fedjax_inv.algorithms import fedbn
from fedjax_inv.data import federation


def main() -> tuple[np.ndarray, np.ndarray]:
    """Print and return the accuracies of five training clients and of two unseen clients."""
    x, y = load_digits(return_X_y=True)
    data = federation.examples((x / 16).astype(np.float32), y.astype(np.int32))
    parts = np.array_split(np.arange(len(y)), 7)
    train, unseen = federation.of_parts(data, parts[:5]), federation.of_parts(data, parts[5:])

    model = models.mlp(10, widths=(32,), norm="batch")
    algorithm = fedbn.fedbn(model, local.epochs(optax.sgd(0.1), batch_size=50))
    start = rounds.init(
        algorithm, model.init(jax.random.key(0), data.x[:1]), train, jax.random.key(1)
    )
    run = jax.jit(lambda *a: rounds.run(algorithm, *a, axis=devices.chunked(1))[0])
    trained = run(start, schedules.everyone(num_clients=5, num_rounds=10), train)

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        path = Path(folder) / "state"
        # A run that continues later also saves trained.round, and with delays broadcast_history.
        checkpointer.save(path, (trained.server, trained.clients))
        checkpointer.wait_until_finished()
        # In another process, `start` gives the structure and shapes of the saved arrays.
        server, own = checkpointer.restore(path, (start.server, start.clients))
    loaded = start._replace(server=server, clients=own)

    evaluate = jax.jit(evaluation.evaluate, static_argnums=0, static_argnames="seen")
    seen = evaluate(algorithm, loaded, train).score
    never_seen = evaluate(algorithm, loaded, unseen, seen=False).score
    print("clients:", np.round(seen, 3), "never seen:", np.round(never_seen, 3))
    return np.asarray(seen), np.asarray(never_seen)


if __name__ == "__main__":
    main()
