import typing

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from lit_efficient.internals import jsonargparse_parser as ours
from tests.internals.leaning import leans_on


class Parser(ours.ChecksValues, LightningArgumentParser):
    def before_check(self, action, value, key):
        if value is None and ours.type_hint(action) is int:
            raise TypeError(f"{key} is null")


class Thing:
    def __init__(self, size: int = 1, name: str | None = None) -> None:
        pass


def parser():
    made = Parser(exit_on_error=False)
    made.add_class_arguments(Thing, "thing")
    return made


@leans_on("jsonargparse", "ArgumentParser._actions", "jsonargparse_parser")
def test_an_option_can_be_changed_after_it_was_added():
    made = ArgumentParser()
    made.add_argument("--size", type=int, required=True)
    (action,) = (action for action in ours.actions(made) if action.dest == "size")
    action.required, action.default = False, 3
    assert made.parse_args([]).size == 3


@leans_on("jsonargparse", "ActionTypeHint._typehint", "jsonargparse_parser")
def test_a_whole_number_stays_one_in_whatever_order_types_are_written():
    def limit(hint):
        made = ArgumentParser()
        made.add_argument("--limit", type=hint)
        ours.put_whole_numbers_first(next(action for action in ours.actions(made) if action.dest == "limit"))
        return [made.parse_args([f"--limit={given}"]).limit for given in ("1", "1.0", "0.5")]

    expected = [(int, 1), (float, 1.0), (float, 0.5)]
    for hint in (typing.Union[float, int], typing.Union[None, float, int], typing.Union[int, float]):  # noqa: UP007 (its order counts)
        assert [(type(value), value) for value in limit(hint)] == expected
    assert limit(typing.Union[float, str]) == [1.0, 1.0, 0.5]  # noqa: UP007 (its order counts)


@leans_on("jsonargparse", "_ActionConfigLoad", "jsonargparse_parser")
def test_an_option_that_takes_the_file_of_a_group_is_told_from_a_value():
    sections = {action.dest: ours.is_section(action) for action in ours.actions(parser()) if action.dest != "help"}
    assert sections == {"thing": True, "thing.size": False, "thing.name": False}


@leans_on("jsonargparse", "ArgumentParser._subcommands_action", "jsonargparse_parser")
def test_parsers_of_subcommands_are_found_by_name():
    main, fit = ArgumentParser(), ArgumentParser()
    assert ours.subcommands(main) == {}
    main.add_subcommands().add_subcommand("fit", fit)
    assert dict(ours.subcommands(main)) == {"fit": fit}


@leans_on("jsonargparse", "ActionTypeHint._typehint", "jsonargparse_parser")
def test_an_option_knows_its_type():
    hints = {action.dest: ours.type_hint(action, "none") for action in ours.actions(parser())}
    assert hints["thing.size"] is int
    assert hints["thing.name"] == str | None
    assert hints["help"] == "none"


@leans_on("jsonargparse", "ArgumentParser._check_value_key", "jsonargparse_parser")
def test_every_value_passes_the_check_null_too():
    assert parser().parse_object({"thing": {"size": 2, "name": None}}).thing.size == 2
    with pytest.raises(ArgumentError, match=r"thing\.size is null"):
        parser().parse_object({"thing": {"size": None}})
    with pytest.raises(ArgumentError, match=r"thing\.size is null"):
        parser().parse_string("thing:\n  size: null\n")


@leans_on("jsonargparse", "ActionTypeHint._check_type_, NestedArg", "jsonargparse_parser")
def test_an_action_s_values_can_be_changed_before_it_checks_them():
    seen = []

    class Doubled(ours.ChangesValues):
        def changed(self, value, earlier):
            seen.append((ours.nested(value) or value, earlier))
            return {"a": 2}

    made = ArgumentParser(exit_on_error=False)
    made.add_argument("--numbers", type=dict[str, int])
    action = next(a for a in ours.actions(made) if a.dest == "numbers")
    action.__class__ = ours.changing(type(action), Doubled)
    assert made.parse_args(["--numbers", '{"b": 1}', "--numbers.c=3"]).numbers == {"a": 2}
    assert (("c", "3"), {"a": 2}) in seen


@leans_on("jsonargparse", "ActionTypeHint._check_type_", "jsonargparse_parser")
def test_what_is_appended_can_be_changed_and_what_it_is_appended_to():
    class Last(ours.ChangesValues):
        def appended(self, value, earlier):
            return None if value == "[1]" else ([9], earlier[-1:])

    made = ArgumentParser(exit_on_error=False)
    made.add_argument("--numbers", type=list[int])
    action = next(a for a in ours.actions(made) if a.dest == "numbers")
    action.__class__ = ours.changing(type(action), Last)
    assert made.parse_args(["--numbers=[5,6]", "--numbers+=[1]"]).numbers == [5, 6, 1]
    assert made.parse_args(["--numbers=[5,6]", "--numbers+=[2]"]).numbers == [6, 9]


@leans_on("jsonargparse", "ArgumentParser._actions", "jsonargparse_parser")
def test_an_option_is_spelt_as_its_parser_has_it():
    main, fit = ArgumentParser(), ArgumentParser()
    fit.add_argument("--my-own", type=int)
    fit.add_argument("--max_steps", type=int)
    main.add_subcommands().add_subcommand("fit", fit)
    given = ["fit", "--my_own=1-2", "--max-steps", "a-b", "-c", "d-e", "--other-one.a-b", "--"]
    assert ours.spelt(given, main) == [
        "fit",
        "--my-own=1-2",
        "--max_steps",
        "a-b",
        "-c",
        "d-e",
        "--other_one.a_b",
        "--",
    ]
