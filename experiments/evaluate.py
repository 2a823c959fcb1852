"""The scores of finished runs by domain, class and client, on their own data or on other data.

fedjax-inv evaluate --run=runs/fedipg-digits-75
fedjax-inv evaluate --run=runs/fedipg-digits-75 --dataset=new.npz --state=last
fedjax-inv evaluate --run=runs/fedipg-digits-75 --metrics=f1,auroc --predictions=p.csv
fedjax-inv evaluate --run=runs/fedipg-digits-75 --export=networks
fedjax-inv evaluate --run=runs/grid-digits --dataset=new.npz

The run with the selected hyperparameters is evaluated, for each seed. On the run's own data the
scores are those of the training: each client is scored on its validation examples, with its own
network if the algorithm is personal, and the test examples by the networks that a line under the
table names. Other data count as the examples of a new client in unseen domains, whatever their
domains and splits; with a personal algorithm each client's own network is evaluated on all of them,
too. Of a folder with several runs, such as a grid's, there is one table with a row for each
cell: the state and the round that it used, and its scores.

--predictions has a line for each example: where it comes from (its file, or the number of its row
in the source, from 0), its targets and what is predicted. A file that is there is replaced only if
this command has written it.

--export writes two files for each seed: networks/seed=0/model.safetensors has the arrays,
model.json the flags, the round, its scores, and what a user of the network must know.

    model = models.mlp(10, widths=(32,))  # model.json: network
    like = jax.eval_shape(model.init, jax.random.key(0), x[:1])
    logits = models.predict(model, models.saved.load("model.safetensors", like), x)
    models.saved.about("model.safetensors")  # what the outputs mean: task, outputs, classes

For a personal algorithm model.safetensors holds the network of a new client, and
clients.safetensors each client's own arrays [C, ...] by the same names. For an algorithm without a
single network model.safetensors holds the server's state.
"""

from absl import app, flags

from . import command_line, sheet, start

_RUN = flags.DEFINE_string(
    "run", "", "The folder of a finished run, or of several: the table has a row for each."
)
_STATE = flags.DEFINE_string(
    "state",
    "best",
    "best: the state that the run's --select selects; last: that of its end; a number: that after "
    "this round, if its checkpoint was kept (--keep_checkpoints).",
)
sheet.must_be_number_or("state", "best", "last", lowest=1)
_PREDICTIONS = flags.DEFINE_string(
    "predictions", "", "A .csv file for the predictions, a line for each run and example."
)
_EXPORT = flags.DEFINE_string(
    "export", "", "A folder for the networks: for each seed its arrays, .safetensors, and .json."
)
# Of train: other data in place of the run's own, and the code of one's own in its training.
_OF_TRAIN = ("dataset", "metrics", "algorithm", "model", "loss", "score")
for _name in (*_OF_TRAIN, "out"):
    flags.declare_key_flag(_name)


@start.binary
def main(argv: list[str]) -> str:
    """Writes the picture, the numbers and what else is asked for, and returns the tables."""
    del argv
    from . import evaluation

    values = flags.FLAGS
    chosen = command_line.chosen()
    options = evaluation.EvaluationOptions(
        _RUN.value,
        _STATE.value,
        chosen.data.dataset if values["dataset"].present else "",
        values.out,
        chosen.evaluation.metrics,
        _PREDICTIONS.value,
        _EXPORT.value,
        chosen.outside,
    )
    return evaluation.run(options)


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse)
