"""Common-subexpression elimination on the jaxpr, before differentiation.

A shared product is then transposed once. The compiler eliminates common subexpressions too, but
only after differentiation: two products of the same arrays have two transposes each by then.

This file reads traced programs of JAX, whose structure may change with a release of JAX. An unknown
operation is executed as it is; if reading fails, the function runs without the elimination, and a
warning says so once. Then it is slower, but still correct.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from fedjax_inv.types import Array, Tree

# Errors of reading a traced program of another structure.
_UNKNOWN_STRUCTURE = (AttributeError, KeyError, NotImplementedError, TypeError, ValueError)


class _Value(NamedTuple):
    name: Hashable  # equal for equal values
    array: Array


class _Operation(NamedTuple):
    """The identity of an operation: its kind, operands and parameters."""

    kind: str
    operands: tuple[Hashable, ...] = ()  # names of values
    params: Hashable = ()


def eliminate_common_subexpressions(fn: Callable[[Tree], Tree]) -> Callable[[Tree], Any]:
    """Return `fn`, of trees of arrays, with each operation on the same arrays done once.

    The derivative of a ReLU along its argument counts as the ReLU itself.
    """

    def eliminated(argument: Tree) -> Tree:
        try:
            return _run(fn, argument)
        except _UNKNOWN_STRUCTURE as error:
            failure = f"{type(error).__name__}: {error}"
        outputs = fn(argument)  # an error of fn itself is raised here again
        _warn(failure.partition("\n")[0])
        return outputs

    return eliminated


@functools.cache
def _warn(failure: str) -> None:
    logging.getLogger(__name__).warning(
        "fedjax_inv.cse does not know the programs of jax %s (%s): results stay the same, but "
        "FedIPG is slower",
        jax.__version__,
        failure,
    )


def _run(fn: Callable[[Tree], Tree], argument: Tree) -> Tree:
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(argument)
    leaves = jax.tree.leaves(argument)
    arguments = [_Value(("argument", index), leaf) for index, leaf in enumerate(leaves)]
    outputs = _Interpreter().run(traced, arguments)
    return jax.tree.unflatten(jax.tree.structure(shapes), [one.array for one in outputs])


class _Interpreter:
    """Runs a traced function, no operation twice."""

    def __init__(self) -> None:
        self._results: dict[_Operation, list[_Value]] = {}
        self._origins: dict[Hashable, _Operation] = {}  # by a value's name

    def run(self, traced: core.ClosedJaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        """Return the outputs."""
        values: dict[core.Var, _Value] = dict(zip(traced.jaxpr.invars, arguments, strict=True))
        for var, const in zip(traced.jaxpr.constvars, traced.consts, strict=True):
            values[var] = _Value(("constant", id(const)), const)

        def read(one: core.Var | core.Literal) -> _Value:
            return _Value(_name(one), one.val) if isinstance(one, core.Literal) else values[one]

        for equation in traced.jaxpr.eqns:
            operands = [read(one) for one in equation.invars]
            inner = _inner(equation, "jit", "jaxpr")
            outputs = self.run(inner, operands) if inner else self._apply(equation, operands)
            values |= zip(equation.outvars, outputs, strict=True)
        return [read(one) for one in traced.jaxpr.outvars]

    def _apply(self, equation: core.JaxprEqn, operands: Sequence[_Value]) -> list[_Value]:
        operation = self._identity(equation, tuple(one.name for one in operands))
        if operation not in self._results:
            arrays = [one.array for one in operands]
            is_relu = operation.kind == "relu"
            outputs = [jax.nn.relu(arrays[-1])] if is_relu else _bind(equation, arrays)
            first = len(self._origins)
            results = [_Value(("result", first + i), array) for i, array in enumerate(outputs)]
            self._results[operation] = results
            self._origins |= {one.name: operation for one in results}
        return self._results[operation]

    def _identity(self, equation: core.JaxprEqn, names: tuple[Hashable, ...]) -> _Operation:
        kind = equation.primitive.name
        params = tuple(sorted(equation.params.items()))
        function = _inner(equation, "custom_jvp_call", "call_jaxpr")
        if function and _is_maximum_with_0(function):
            return _Operation("relu", names)
        if kind == "select_n" and self._is_the_positive_part(names):
            return _Operation("relu", names[2:])
        return _Operation(kind, names, object() if equation.effects else _hashable(params))

    def _is_the_positive_part(self, names: tuple[Hashable, ...]) -> bool:
        """Whether select_n of these operands is x where x > 0, and elsewhere 0."""
        if len(names) != 3:
            return False
        condition, below = (self._origins.get(name, _Operation("")) for name in names[:2])
        return (
            (condition.kind, below.kind) == ("gt", "broadcast_in_dim")
            and condition.operands[0] == names[2]
            and _is_zero(condition.operands[1])
            and _is_zero(below.operands[0])
        )


def _inner(equation: core.JaxprEqn, kind: str, param: str) -> core.ClosedJaxpr | None:
    """The function that an operation of this kind calls; None for another kind or structure."""
    inner = equation.params.get(param) if equation.primitive.name == kind else None
    return inner if isinstance(inner, core.ClosedJaxpr) else None


def _hashable(params: Hashable) -> Hashable:
    """The params, or if they cannot be compared an object that equals nothing else."""
    try:
        hash(params)
    except TypeError:
        return object()
    return params


def _name(literal: core.Literal) -> Hashable:
    """The name of a literal: equal for the same number of the same type."""
    value = np.asarray(literal.val)
    if value.shape:
        return "constant", id(literal)
    return "number", repr(value.item()), str(literal.aval)  # -0.0 is not 0.0


def _is_zero(name: Hashable) -> bool:
    return isinstance(name, tuple) and name[:2] == ("number", "0.0")


def _is_maximum_with_0(traced: core.ClosedJaxpr) -> bool:
    """Whether a function is max(x, 0) of its one argument."""
    while len(traced.jaxpr.eqns) == 1:
        inner = _inner(traced.jaxpr.eqns[0], "jit", "jaxpr")
        if inner is None:
            break
        traced = inner
    operations = [(one.primitive.name, one.invars) for one in traced.jaxpr.eqns]
    if len(operations) != 1 or operations[0][0] != "max":
        return False
    (argument, *others) = operations[0][1]
    zeros = [isinstance(one, core.Literal) and _is_zero(_name(one)) for one in others]
    return list(traced.jaxpr.invars) == [argument] and zeros == [True]


def _bind(equation: core.JaxprEqn, operands: Sequence[Array]) -> list[Array]:
    """The outputs of one operation."""
    primitive = equation.primitive
    params = primitive.get_bind_params(equation.params)
    functions: Sequence[Any] = ()
    if isinstance(params, tuple):  # before jax 0.10
        functions, params = params
    with equation.ctx.manager:
        outputs = primitive.bind(*functions, *operands, **params)
    return list(outputs) if primitive.multiple_results else [outputs]
