"""Plain programs: chat templates that only join texts of messages with their own texts, as data.

A program is made in the template process from the parsed template, without running it; `plain_template` runs it in the
server, so that most chats need no process. A template that does anything else has none. Imports jinja2 only.

A program consists of nested lists, each beginning with a word: statements `text`, `out`, `if` and `for` (over
`messages`, never nested), expressions `const`, `name`, `key`, `item`, `loop`, `add`, `and`, `or`, `not`, `compare`,
`is` and `trim`.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes

MAX_NODES = 500
TESTS = frozenset({"defined", "undefined", "none", "string"})
COMPARISONS = frozenset({"eq", "ne", "in", "notin", "lt", "gt", "lteq", "gteq"})
LOOP_FIELDS = frozenset({"first", "last", "index", "index0"})


class NotPlain(Exception):
    """The template does something that programs cannot express."""


def plain_program(template: nodes.Template) -> list[Any] | None:
    """Return the plain program of a template, or None: the template has to be run as it is."""
    try:
        return _Builder().body(template.body, None)
    except (NotPlain, RecursionError):
        return None


class _Builder:
    def __init__(self) -> None:
        self._num_nodes = 0

    def body(self, statements: list[nodes.Node], item: str | None) -> list[Any]:
        """Return the statements. `item`: the enclosing loop's name of its message; None outside."""
        found: list[Any] = []
        for statement in statements:
            self._count()
            if isinstance(statement, nodes.Output):
                found += [self._output(each, item) for each in statement.nodes]
            elif isinstance(statement, nodes.If):
                found.append(self._if(statement, item))
            elif isinstance(statement, nodes.For) and item is None:
                found.append(self._for(statement))
            else:
                raise NotPlain
        return found

    def _count(self) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise NotPlain

    def _output(self, node: nodes.Expr, item: str | None) -> list[Any]:
        if isinstance(node, nodes.TemplateData):
            self._count()
            return ["text", node.data]
        return ["out", self._expression(node, item)]

    def _if(self, node: nodes.If, item: str | None) -> list[Any]:
        otherwise = self.body(node.else_, item)
        for branch in reversed(node.elif_):
            otherwise = [["if", self._expression(branch.test, item), self.body(branch.body, item), otherwise]]
        return ["if", self._expression(node.test, item), self.body(node.body, item), otherwise]

    def _for(self, node: nodes.For) -> list[Any]:
        is_over_messages = isinstance(node.iter, nodes.Name) and node.iter.name == "messages"
        if not is_over_messages or not isinstance(node.target, nodes.Name) or node.else_ or node.test or node.recursive:
            raise NotPlain
        if node.target.name in ("messages", "loop"):
            raise NotPlain
        return ["for", node.target.name, self.body(node.body, node.target.name)]

    def _expression(self, node: nodes.Node, item: str | None) -> list[Any]:
        self._count()
        match node:
            case nodes.Const(value=value) if value is None or isinstance(value, str | bool | int):
                return ["const", value]
            case nodes.Name(name=name) if name != "loop":
                return ["name", name]
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr) if item is not None and attr in LOOP_FIELDS:
                return ["loop", attr]
            case nodes.Getattr(node=of, attr=attr):
                return ["key", self._expression(of, item), attr]
            case nodes.Getitem(node=of, arg=nodes.Const(value=str(key))):
                return ["key", self._expression(of, item), key]
            case nodes.Getitem(node=of, arg=nodes.Const(value=int(index))):
                return ["item", self._expression(of, item), index]
            case nodes.Getitem(node=of, arg=nodes.Neg(node=nodes.Const(value=int(index)))):
                return ["item", self._expression(of, item), -index]
            case nodes.Add(left=left, right=right):
                return ["add", self._expression(left, item), self._expression(right, item)]
            case nodes.Concat(nodes=parts):
                return ["add", *(self._expression(each, item) for each in parts)]
            case nodes.And(left=left, right=right):
                return ["and", self._expression(left, item), self._expression(right, item)]
            case nodes.Or(left=left, right=right):
                return ["or", self._expression(left, item), self._expression(right, item)]
            case nodes.Not(node=of):
                return ["not", self._expression(of, item)]
            case nodes.Compare(expr=left, ops=[nodes.Operand(op=op, expr=right)]) if op in COMPARISONS:
                return ["compare", op, self._expression(left, item), self._expression(right, item)]
            case nodes.Test(node=of, name=name, args=[], kwargs=[], dyn_args=None, dyn_kwargs=None) if name in TESTS:
                return ["is", name, self._expression(of, item)]
            case nodes.Filter(node=nodes.Expr() as of, name="trim", args=[], kwargs=[], dyn_args=None, dyn_kwargs=None):
                return ["trim", self._expression(of, item)]
        raise NotPlain
