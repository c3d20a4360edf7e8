"""A test of a private name says in one sentence what an upgrade has broken, and where to mend it."""

import functools
from importlib.metadata import version

import pytest


def leans_on(package, name, module):
    """The test below proves that ``package`` still has ``name`` as ``lit_efficient/internals/<module>.py`` uses it."""

    def decorate(test):
        @functools.wraps(test)
        def checked(*args, **kwargs):
            try:
                test(*args, **kwargs)
            except Exception as error:
                reason = " ".join(str(error).split())
                complaint = pytest.fail.Exception(
                    f"{package} {version(package)} has no {name} as we use it: "
                    f"mend lit_efficient/internals/{module}.py ({type(error).__name__}: {reason})",
                    pytrace=False,
                )
            else:
                return
            raise complaint

        checked.leans_on = (f"{getattr(test, 'leans_on', ('', ''))[0]} {name}", module)
        return checked

    return decorate
