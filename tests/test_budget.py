"""The package does not grow beyond its budget of lines."""

from tests.budget import LIMIT, longest_files, longest_functions, report, sources


def test_the_package_keeps_to_its_budget() -> None:
    total = sum(len(text.splitlines()) for text in sources().values())
    assert total <= LIMIT, "\n".join(report())


def test_the_longest_are_found() -> None:
    texts = {"a.py": "def f():\n    pass\n", "b.py": "class C:\n    def g(self):\n        def h():\n            pass\n"}
    assert longest_files(texts, 1) == [(4, "b.py")]
    assert longest_functions(texts) == [(3, "b.py:2 g"), (2, "b.py:3 h"), (2, "a.py:1 f")]
