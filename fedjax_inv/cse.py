"""What a function computes twice, computed once, so that its gradient is that of the one.

A compiler shares equal values as well, but sees a gradient when it is written: two products of the
same arrays have had their transposes each.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from fedjax_inv.types import Array, Tree


class _Value(NamedTuple):
    name: Hashable  # the same for what is the same
    array: Array


class _Known(NamedTuple):
    """What an operation is known by: its kind, what it is done to, and how."""

    kind: str
    names: tuple[Hashable, ...] = ()
    how: Hashable = ()


def eliminate_common_subexpressions(fn: Callable[[Tree], Tree]) -> Callable[[Tree], Any]:
    """`fn`, each operation on the same arrays done once. fn: a tree of arrays -> a tree of arrays.

    Of a ReLU, x where it is above 0, its derivative along x, is the ReLU itself.
    """

    def once(argument: Tree) -> Tree:
        traced, told = jax.make_jaxpr(fn, return_shape=True)(argument)
        given = [_Value(("given", i), leaf) for i, leaf in enumerate(jax.tree.leaves(argument))]
        outputs = _Once().run(traced, given)
        return jax.tree.unflatten(jax.tree.structure(told), [one.array for one in outputs])

    return once


class _Once:
    """Runs a traced function, no operation twice."""

    def __init__(self) -> None:
        self._done: dict[_Known, list[_Value]] = {}
        self._made_by: dict[Hashable, _Known] = {}  # by a value's name

    def run(self, traced: ClosedJaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        """The outputs."""
        held: dict[Var, _Value] = dict(zip(traced.jaxpr.invars, arguments, strict=True))
        for var, const in zip(traced.jaxpr.constvars, traced.consts, strict=True):
            held[var] = _Value(("constant", id(const)), const)

        def read(one: Var | Literal) -> _Value:
            return _Value(_name(one), one.val) if isinstance(one, Literal) else held[one]

        for equation in traced.jaxpr.eqns:
            operands = [read(one) for one in equation.invars]
            inner = equation.params["jaxpr"] if equation.primitive.name == "jit" else None
            outputs = self.run(inner, operands) if inner else self._do(equation, operands, traced)
            held |= zip(equation.outvars, outputs, strict=True)
        return [read(one) for one in traced.jaxpr.outvars]

    def _do(
        self, equation: JaxprEqn, operands: Sequence[_Value], traced: ClosedJaxpr
    ) -> list[_Value]:
        known = self._known(equation, tuple(one.name for one in operands))
        if known not in self._done:
            arrays = [one.array for one in operands]
            is_relu = known.kind == "relu"
            made = [jax.nn.relu(arrays[-1])] if is_relu else _alone(equation, arrays, traced)
            first = len(self._made_by)
            values = [_Value(("made", first + i), array) for i, array in enumerate(made)]
            self._done[known] = values
            self._made_by |= {one.name: known for one in values}
        return self._done[known]

    def _known(self, equation: JaxprEqn, names: tuple[Hashable, ...]) -> _Known:
        kind, params = equation.primitive.name, tuple(sorted(equation.params.items()))
        if kind == "custom_jvp_call" and _is_maximum_with_0(equation.params["call_jaxpr"]):
            return _Known("relu", names)
        if kind == "select_n" and self._is_what_is_above_0(names):
            return _Known("relu", names[2:])
        return _Known(kind, names, object() if equation.effects else _hashable(params))

    def _is_what_is_above_0(self, names: tuple[Hashable, ...]) -> bool:
        if len(names) != 3:
            return False
        chosen, below = (self._made_by.get(name, _Known("")) for name in names[:2])
        return (
            (chosen.kind, below.kind) == ("gt", "broadcast_in_dim")
            and chosen.names[0] == names[2]
            and _is_zero(chosen.names[1])
            and _is_zero(below.names[0])
        )


def _hashable(params: Hashable) -> Hashable:
    """The params, or where they cannot be compared what is like nothing else."""
    try:
        hash(params)
    except TypeError:
        return object()
    return params


def _name(literal: Literal) -> Hashable:
    """A number is the same as that number of its type."""
    value = np.asarray(literal.val)
    if value.shape:
        return "constant", id(literal)
    return "number", repr(value.item()), str(literal.aval)  # -0.0 is not 0.0


def _is_zero(name: Hashable) -> bool:
    return isinstance(name, tuple) and name[:2] == ("number", "0.0")


def _is_maximum_with_0(traced: ClosedJaxpr) -> bool:
    """Of its one argument."""
    while len(traced.jaxpr.eqns) == 1 and traced.jaxpr.eqns[0].primitive.name == "jit":
        traced = traced.jaxpr.eqns[0].params["jaxpr"]
    operations = [(one.primitive.name, one.invars) for one in traced.jaxpr.eqns]
    if len(operations) != 1 or operations[0][0] != "max":
        return False
    (argument, *others) = operations[0][1]
    zeros = [isinstance(one, Literal) and _is_zero(_name(one)) for one in others]
    return list(traced.jaxpr.invars) == [argument] and zeros == [True]


def _alone(equation: JaxprEqn, operands: Sequence[Array], traced: ClosedJaxpr) -> list[Array]:
    """The outputs of an operation of a traced function."""
    given = {
        var: array
        for var, array in zip(equation.invars, operands, strict=True)
        if not isinstance(var, Literal)
    }
    origin = traced.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    jaxpr = Jaxpr((), list(given), equation.outvars, [equation], equation.effects, origin)
    return list(jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*given.values()))
