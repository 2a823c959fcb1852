"""Laws of evaluation, communication and missing uploads."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_inv import communication, evaluation, models, tree
from fedjax_inv.testing import inputs
from fedjax_inv.testing.case import Case, NotApplicable
from fedjax_inv.testing.comparing import assert_close, assert_finite, assert_same_shapes, plain
from fedjax_inv.testing.inputs import NUM_CLIENTS
from fedjax_inv.types import Array, Tree


def _mean(outputs: Array, y: Tree, mask: Array) -> Array:
    """Return the mean output over the real examples."""
    del y
    each = outputs.reshape(len(outputs), -1).mean(1)
    return jnp.where(mask, each, 0).sum() / jnp.maximum(mask.sum(), 1)


def _mean_square(outputs: Array, y: Tree, mask: Array) -> Array:
    return _mean(outputs**2, y, mask)


def an_evaluation_is_the_mean_over_examples(case: Case) -> None:
    """`evaluate` in batches equals `predict` of all examples, for seen and unseen clients.

    A personal algorithm predicts with the client's own state, and any other with ().
    """
    algorithm, federation = case.algorithm, case.federation

    def served(state: Tree) -> Tree:
        def outputs(own: Tree) -> Array:
            return algorithm.predict(state.server, own, federation.data.x)

        def scores(seen: bool) -> Tree:
            return evaluation.evaluate(
                algorithm,
                state,
                federation,
                seen=seen,
                batch_size=4,
                loss=_mean_square,
                score=_mean,
            )

        if not algorithm.personal:
            return [(scores(True), jnp.stack([outputs(())] * NUM_CLIENTS))]
        who = jnp.arange(NUM_CLIENTS, dtype=jnp.int32)
        new = jax.vmap(lambda who: algorithm.init_client(state.server, who))(who)
        states = ((True, state.clients), (False, new))
        return [(scores(seen), jax.vmap(outputs)(own)) for seen, own in states]

    program = jax.jit(served, compiler_options=case.options)
    for got, outputs in plain(program(case.restored(case.result[0]))):
        assert_finite(outputs)
        for who, size in enumerate(inputs.SIZES):
            if size == 0:
                assert_close((got.score[who], got.loss[who]), (np.zeros(()), np.zeros(())))
                continue
            own = outputs[who][inputs.rows_of(federation, who)].astype(np.float64)
            assert_close(got.score[who], np.array(own.mean()))
            assert_close(got.loss[who], np.array((own**2).mean()))


def the_network_gives_the_outputs_for_a_new_client(case: Case) -> None:
    """`models.predict` of `Algorithm.network` equals `predict` for a client that was never seen."""
    algorithm, network = case.algorithm, case.algorithm.network
    if network is None or algorithm.own_outputs:
        raise NotApplicable("it has no network, or says that it has `own_outputs`")
    x = case.federation.data.x

    def outputs(server: Tree) -> tuple[Array, Array]:
        own = algorithm.init_client(server, jnp.int32(0)) if algorithm.personal else ()
        return algorithm.predict(server, own, x), models.predict(case.model, network(server), x)

    program = jax.jit(outputs, compiler_options=case.options)
    assert_close(*plain(program(case.restored(case.result[0]).server)))


def bytes_follow_from_shapes(case: Case) -> None:
    """The bytes of each exchange can be counted from shapes, and something is uploaded."""
    turns = case.traced.turns
    assert len(turns) == len(case.algorithm.exchanges)
    for index, (visit, reply) in enumerate(turns):
        sent = (visit.message, visit.undelayed_message, reply.upload)
        assert communication.size(sent) > 0, f"exchange {index} sends nothing"
    uploads = [communication.size(turn.reply.upload) for turn in turns]
    assert sum(uploads) > 0, "no client uploads anything"


def a_blank_upload_fits(case: Case) -> None:
    """`Exchange.blank`, if there is one, gives zeros of the shapes of an upload."""
    blanks = [each.blank for each in case.algorithm.exchanges]
    if not any(blanks):
        raise NotApplicable("no exchange has `blank`, so no upload may stand in for a missing one")
    for blank, turn in zip(blanks, case.traced.turns, strict=True):
        if blank:
            upload = blank(tree.take(case.starts.server, 0))
            assert_same_shapes("a blank upload", turn.reply.upload, upload)
            for leaf in jax.tree.leaves(plain(upload)):
                assert not leaf.any(), "a blank upload holds other numbers than 0"
