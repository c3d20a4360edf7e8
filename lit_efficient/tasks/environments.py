"""Environments that answer a language model while it writes: tools that it calls, games, users.

    reset -> prompt -> the model's turn -> step -> answers -> the model's turn -> ... -> step returns no answer

Each conversation has a copy of the environment. A call that raises, takes too long, or returns no messages leaves the
sample out of the training, with a sentence.
"""

import ast
import copy
import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng

from lit_efficient.data.text.chat_formats import Message
from lit_efficient.distributed.seeds import seed_all
from lit_efficient.errors import ChecksTypes, ConfigurationError, check_list, check_number, refusal, shown
from lit_efficient.tasks.rewards import TookTooLong, at_most

_ROLES = ("system", "user", "tool")
_LONGEST_RESULT = 10_000  # characters


class Environment:
    """Base of environments. It never answers.

    A subclass overrides `reset`, `step` or both. It may keep its state in attributes. The attributes below may be
    overridden by class attributes or by arguments. A reward with an argument ``environment`` gets the copy of its
    conversation.
    """

    tools: Sequence[Any] = ()
    """Descriptions of tools for the chat template, as JSON schemas of functions."""
    turns: int = 8
    """Largest number of turns of the model. A conversation that would go on is truncated."""
    max_tokens: int = 512
    """Largest number of tokens of all answers in a conversation. A conversation with more is truncated."""
    seconds: float = 10.0
    """Longest time for `reset`, and for a `step`."""

    def reset(self, messages: list[Message], row: Mapping[str, Any]) -> list[Message]:
        """Begin a conversation, and return its first messages.

        Args:
            messages: Messages of the prompt.
            row: Row of the data.
        """
        return messages

    def step(self, messages: list[Message]) -> list[Message]:
        """Return answers to the model's turn, or an empty list to end the conversation.

        Args:
            messages: All messages. The last one is the model's turn. It has ``tool_calls``, in the format of OpenAI
                with ``arguments`` as a mapping, if the model has called tools.
        """
        return []


class ToolEnvironment(ChecksTypes, Environment):
    """Environment that calls the Python functions whose names the model writes, and answers with their results.

    The functions need annotated arguments and a docstring with an ``Args:`` section. transformers makes descriptions of
    them, which the chat template writes. An error of a function is its result. For tools with a state, inherit from
    this class and give methods to its constructor.

    Args:
        functions: Functions by their dotted names: ``lit_efficient.tasks.environments.calculate``, or of a package that
            ``--allow-import`` names.
        turns: Largest number of turns of the model. A conversation that would go on is truncated.
        max_tokens: Largest number of tokens of all results in a conversation. A conversation with more is truncated.
        seconds: Longest time for the calls of a turn, which share it, above 0.
    """

    def __init__(
        self,
        functions: list[Callable[..., Any]],
        turns: int = 8,
        max_tokens: int = 512,
        seconds: float = 10.0,
    ) -> None:
        check_list("ToolEnvironment", "functions", functions, "a list of at least one function")
        check_number("ToolEnvironment", "turns", turns, least=1, whole=True)
        check_number("ToolEnvironment", "max_tokens", max_tokens, least=1, whole=True)
        check_number("ToolEnvironment", "seconds", seconds, above=0)
        self.functions = functions
        self.turns = turns
        self.max_tokens = max_tokens
        self.seconds = seconds
        self.tools = [_description(function) for function in functions]
        names = [tool["function"]["name"] for tool in self.tools]
        if len({*names}) < len(names):
            raise refusal("ToolEnvironment", "functions", "functions with different names", names)

    def step(self, messages: list[Message]) -> list[Message]:
        """Return the results of the calls of the last message."""
        calls = messages[-1].get("tool_calls", [])
        answers = []
        for call in calls:
            name = call["function"]["name"]
            content = self._result(name, call["function"]["arguments"], self.seconds / (len(calls) + 1))
            answers.append({"role": "tool", "name": name, "tool_call_id": call["id"], "content": content})
        return answers

    def _result(self, name: str, arguments: Mapping[str, Any], seconds: float) -> str:
        functions = {tool["function"]["name"]: function for tool, function in zip(self.tools, self.functions)}
        if name not in functions:
            return f"Error: there is no tool {name!r}"
        try:
            with at_most(seconds):
                result = functions[name](**arguments)
                text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except TookTooLong:
            return f"Error: {name} took longer than {seconds:g} seconds"
        except (Exception, SystemExit) as error:  # functions of users raise anything, and the model gives any arguments
            text = f"Error: {shown(error, _LONGEST_RESULT)}"
        return text[:_LONGEST_RESULT]


def _description(function: Any) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return dict(get_json_schema(function))
    except Exception as error:  # transformers has errors of its own for each part of a function
        allowed = "functions with annotated arguments and a docstring with an Args: section"
        name = getattr(function, "__name__", function)
        raise refusal("ToolEnvironment", "functions", f"{allowed} ({error})", name) from error


def check_environment(environment: Environment) -> None:
    """Check the limits of an environment, and that conversations can have copies of it.

    Raises:
        ConfigurationError: Naming the attribute, or the environment that cannot be copied.
    """
    name = type(environment).__name__
    check_number(name, "turns", environment.turns, least=1, whole=True)
    check_number(name, "max_tokens", environment.max_tokens, least=1, whole=True)
    check_number(name, "seconds", environment.seconds, above=0)
    try:
        copy.deepcopy(environment)
    except Exception as error:  # classes of users raise anything
        raise ConfigurationError(
            f"{name}: each conversation needs a copy, and copying raised {type(error).__name__}: {shown(error)}. "
            "Define __deepcopy__, or make what cannot be copied in reset"
        ) from error


def call_environment(environment: Environment, seed: int, method: str, *given: object) -> tuple[list[Message], str]:
    """Return the messages that a method of an environment returns and "", or no messages and a sentence.

    The method may use the global random numbers, which depend on the seed, and which the run does not notice.
    """
    name = f"{type(environment).__name__}.{method}"
    try:
        with isolate_rng(), at_most(environment.seconds):
            seed_all(seed)
            # Copies, because an environment may keep and change what it is given and what it returns.
            found = copy.deepcopy(getattr(environment, method)(*copy.deepcopy(given)))
    except TookTooLong:
        return [], f"{name} took longer than {environment.seconds:g} seconds"
    except (Exception, SystemExit) as error:  # environments of users raise anything
        return [], f"{name} raised {type(error).__name__}: {shown(error)}"
    begins = method == "reset"
    roles = (*_ROLES, "assistant", "developer") if begins else _ROLES
    if (
        isinstance(found, list)
        and len(found) >= begins
        and all(
            isinstance(one, dict) and one.get("role") in roles and isinstance(one.get("content"), str) for one in found
        )
    ):
        return found, ""
    expected = (
        f"a list of {'at least one message' if begins else 'messages'} with content and role ({', '.join(roles)})"
    )
    return [], f"{name} returned {shown(found)}, which is not {expected}"


_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_LONGEST_EXPRESSION = 200  # characters
_LARGEST_POWER = 1000  # binary digits


def calculate(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / ** and parentheses, such as (2 + 3) * 4.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"the expression has more than {_LONGEST_EXPRESSION} characters")
    try:
        if not re.fullmatch(r"[0-9.eE+*/()\s-]+", expression):
            raise SyntaxError
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("only numbers, + - * / ** and parentheses are allowed") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the result is too large")
    return str(int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value)


def _value(node: ast.expr) -> Any:
    """Return the value of an expression of numbers. Nothing else is evaluated."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base = _value(node.left)
        exponent = _value(node.right)
        if abs(exponent) * math.log2(max(abs(base), 2)) > _LARGEST_POWER or (base < 0 and exponent != int(exponent)):
            raise ValueError("the power is too large, or no real number")
        return base**exponent
    raise SyntaxError
