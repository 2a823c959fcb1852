"""Many runs of one experiment, seeds x hyperparameters x clients, as one compiled program.

    compiled = make(experiment)
    training = compiled.init(data, inputs)
    outcome = compiled.evaluate(data, inputs, training)                     # before the first round
    training, outcome = compiled.segment(data, inputs, training, cohorts)   # again and again

`host_inputs` computes the inputs on the host, `one_run` defines a single run, and `compiled`
compiles all runs and places their arrays. `streams` plays them with examples that stay on the host.
Nothing here depends on flags, files or the screen. Axis letter: R runs.
"""

from fedjax_inv.program.compiled import Program as Program
from fedjax_inv.program.compiled import make as make
from fedjax_inv.program.host_inputs import Detailed as Detailed
from fedjax_inv.program.host_inputs import Inputs as Inputs
from fedjax_inv.program.host_inputs import Run as Run
from fedjax_inv.program.host_inputs import Watched as Watched
from fedjax_inv.program.host_inputs import cohorts as cohorts
from fedjax_inv.program.host_inputs import grid as grid
from fedjax_inv.program.host_inputs import group_names as group_names
from fedjax_inv.program.host_inputs import groups as groups
from fedjax_inv.program.host_inputs import inputs as inputs
from fedjax_inv.program.host_inputs import schedule_key as schedule_key
from fedjax_inv.program.one_run import DetailedScores as DetailedScores
from fedjax_inv.program.one_run import Experiment as Experiment
from fedjax_inv.program.one_run import OneRun as OneRun
from fedjax_inv.program.one_run import Outcome as Outcome
from fedjax_inv.program.one_run import Scores as Scores
from fedjax_inv.program.one_run import Training as Training
from fedjax_inv.program.streams import streamed as streamed
