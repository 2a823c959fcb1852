"""Causal and invariant federated learning: pure functions, whole experiments as one program."""

__version__ = "0.16.0"

from fedjax_inv import aggregators as aggregators
from fedjax_inv import algorithms as algorithms
from fedjax_inv import averaging as averaging
from fedjax_inv import callbacks as callbacks
from fedjax_inv import communication as communication
from fedjax_inv import data as data
from fedjax_inv import devices as devices
from fedjax_inv import evaluation as evaluation
from fedjax_inv import inputs as inputs
from fedjax_inv import local as local
from fedjax_inv import models as models
from fedjax_inv import objectives as objectives
from fedjax_inv import permutation as permutation
from fedjax_inv import program as program
from fedjax_inv import rounds as rounds
from fedjax_inv import schedules as schedules
from fedjax_inv import servers as servers
from fedjax_inv import stopping as stopping
from fedjax_inv import tree as tree
from fedjax_inv import types as types
from fedjax_inv.fit import Evaluations as Evaluations
from fedjax_inv.fit import fit as fit
