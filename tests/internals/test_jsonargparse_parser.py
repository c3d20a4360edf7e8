import typing

import pytest
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from lit_efficient.internals import jsonargparse_parser as ours
from tests.internals.leaning import leans_on


class Parser(ours.ChecksEmptyValues, LightningArgumentParser):
    pass


class Thing:
    def __init__(self, size: int = 1, name: str | None = None) -> None:
        pass


def parser():
    made = Parser(exit_on_error=False)
    made.add_class_arguments(Thing, "thing")
    return made


@leans_on("jsonargparse", "ArgumentParser._actions", "jsonargparse_parser")
def test_an_argument_that_the_run_knows_may_be_left_unset():
    made = ArgumentParser()
    made.add_argument("--size", type=int, required=True)
    ours.prepare_arguments(made, ["size"])
    assert made.parse_args([]).size is None


@leans_on("jsonargparse", "ActionTypeHint._typehint", "jsonargparse_parser")
def test_a_whole_number_stays_whole_whatever_the_order_of_the_types():
    def limit(hint):
        made = ArgumentParser()
        made.add_argument("--limit", type=hint)
        ours.prepare_arguments(made, [])
        return [made.parse_args([f"--limit={given}"]).limit for given in ("1", "1.0", "0.5")]

    expected = [(int, 1), (float, 1.0), (float, 0.5)]
    for hint in (typing.Union[float, int], typing.Union[None, float, int], typing.Union[int, float]):  # noqa: UP007 (its order counts)
        assert [(type(value), value) for value in limit(hint)] == expected
    assert limit(typing.Union[float, str]) == [1.0, 1.0, 0.5]  # noqa: UP007 (its order counts)


@leans_on("jsonargparse", "_ActionConfigLoad", "jsonargparse_parser")
def test_an_option_that_takes_the_file_of_a_group_is_told_from_a_value():
    sections = {option.key: option.is_section for option in ours.options(parser()) if option.key != "help"}
    assert sections == {"thing": True, "thing.size": False, "thing.name": False}


@leans_on("jsonargparse", "ArgumentParser._subcommands_action", "jsonargparse_parser")
def test_parsers_of_subcommands_are_found_by_name():
    main, fit = ArgumentParser(), ArgumentParser()
    assert ours.subcommands(main) == {}
    main.add_subcommands().add_subcommand("fit", fit)
    assert dict(ours.subcommands(main)) == {"fit": fit}


@leans_on("jsonargparse", "ActionTypeHint._typehint", "jsonargparse_parser")
def test_an_option_knows_its_type():
    hints = {option.key: option.hint for option in ours.options(parser())}
    assert hints["thing.size"] is int
    assert hints["thing.name"] == str | None
    assert hints["help"] is None


@leans_on("jsonargparse", "ArgumentParser._check_value_key", "jsonargparse_parser")
def test_null_is_refused_where_the_type_does_not_allow_it():
    assert parser().parse_object({"thing": {"size": 2, "name": None}}).thing.size == 2
    with pytest.raises(ArgumentError, match=r"thing\.size"):
        parser().parse_object({"thing": {"size": None}})
    with pytest.raises(ArgumentError, match=r"thing\.size"):
        parser().parse_string("thing:\n  size: null\n")
    with pytest.raises(ArgumentError, match="mapping of keys"):
        parser().parse_object({"thing": 3})


@leans_on("jsonargparse", "_loaders_dumpers.get_yaml_default_loader", "jsonargparse_parser")
def test_yaml_is_read_as_jsonargparse_reads_it():
    assert yaml.load("[1e-3, 2024-01-01, 1.5]", ours.YAML_LOADER) == [1e-3, "2024-01-01", 1.5]


@leans_on("jsonargparse", "ArgumentParser._actions", "jsonargparse_parser")
def test_an_option_is_spelt_as_its_parser_has_it():
    made = ArgumentParser()
    made.add_argument("--my-own", type=int)
    given = ["--my_own=1-2", "a-b", "-c", "--other-one.a-b"]
    assert ours.spelt_for(made, given) == ["--my-own=1-2", "a-b", "-c", "--other-one.a-b"]
