"""The report on the size of the package counts statements and expressions by folder."""

from collections import Counter

from tests.size import nodes_here, nodes_of, table


def test_statements_and_expressions_are_counted_and_nothing_else() -> None:
    # One assignment, one name, one sum, two constants; the operator is neither a statement nor an expression.
    assert nodes_of("x = 1 + 2") == 5
    assert nodes_of("x = (1 +\n     2)  # a comment\n") == 5


def test_each_folder_is_a_row_with_its_change() -> None:
    lines = table(Counter({"callbacks": 1200, ".": 30}), Counter({"callbacks": 1000, ".": 40}))
    assert [line.split() for line in lines] == [
        ["callbacks", "1,200", "+200"],
        [".", "30", "-10"],
        ["total", "1,230", "+190"],
    ]


def test_the_package_is_found() -> None:
    assert nodes_here()["callbacks"] > nodes_here()["plugins"] > 0
