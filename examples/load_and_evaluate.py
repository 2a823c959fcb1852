"""Save what was trained, load it again, and ask how each client is served.

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
    """Prints and returns the accuracies of five clients, and of two that were never seen."""
    x, y = load_digits(return_X_y=True)
    data = federation.examples((x / 16).astype(np.float32), y.astype(np.int32))
    parts = np.array_split(np.arange(len(y)), 7)
    train, strangers = federation.of_parts(data, parts[:5]), federation.of_parts(data, parts[5:])

    model = models.mlp(10, widths=(32,), norm="batch")
    algorithm = fedbn.fedbn(model, local.epochs(optax.sgd(0.1), batch_size=50))
    start = rounds.init(
        algorithm, model.init(jax.random.key(0), data.x[:1]), train, jax.random.key(1)
    )
    run = jax.jit(lambda *a: rounds.run(algorithm, *a, axis=devices.chunked(1))[0])
    trained = run(start, schedules.everyone(num_clients=5, num_rounds=10), train)

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        path = Path(folder) / "state"
        # The key is no array; a run that is to go on saves jax.random.key_data of it as well.
        checkpointer.save(path, (trained.server, trained.clients))
        checkpointer.wait_until_finished()
        # In another process: `start` says what is expected, the file what was learned.
        server, own = checkpointer.restore(path, (start.server, start.clients))
    loaded = start._replace(server=server, clients=own)

    evaluate = jax.jit(evaluation.evaluate, static_argnums=0, static_argnames="seen")
    seen = evaluate(algorithm, loaded, train).score
    never_seen = evaluate(algorithm, loaded, strangers, seen=False).score
    print("clients:", np.round(seen, 3), "never seen:", np.round(never_seen, 3))
    return np.asarray(seen), np.asarray(never_seen)


if __name__ == "__main__":
    main()
