"""`python -m experiments.NAME` in a checkout: NAME in fedjax_inv_experiments."""

import fedjax_inv_experiments

__path__ = fedjax_inv_experiments.__path__
