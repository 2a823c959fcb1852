"""Federated training on arrays in one call: `fit`, and its result `Fitted`.

    fitted = fit(fedavg.fedavg, model, clients, rounds=50, learning_rate=[0.05, 0.1], seeds=[0, 1])
    fitted.history["train_loss"]   # [R, E]: four runs, an evaluation after each round
    fitted.predict(x, run=2)       # outputs of the first seed with the second rate

It stands on `program`, which compiles all seeds and hyperparameters into one program.
"""

from fedjax_inv.fitting.call import fit as fit
from fedjax_inv.fitting.fitted import Fitted as Fitted
from fedjax_inv.fitting.fitted import History as History
