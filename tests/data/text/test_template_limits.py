"""Tests of the limits for chat templates: a template is stopped, and the limits of the process are restored."""

import resource
import signal

import pytest

from lit_efficient.data.text.template_limits import limited
from lit_efficient.errors import ConfigurationError
from tests.data.text.chat_kit import CHATML, train_chat_tokenizer


def rendered(template):
    tokenizer = train_chat_tokenizer(["a b"], 260)
    tokenizer.chat_template = template
    with limited(template):
        return tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 'a' * 10000000000 }}", "1 GiB of memory or more"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself"),
        ("{{ messages | length ** 9 }}", "powers"),
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "more than 2 s"),
    ],
)
def test_it_is_stopped(template, said):
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(ConfigurationError, match=said):
        rendered(template)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


def test_others_are_not():
    assert "Hi" in rendered(CHATML)
    assert "**Hi**" in rendered("**{{ '**' ~ messages[0]['content'] }}**")


def test_limits_of_a_conversation_are_set_once_however_often_it_is_rendered(monkeypatch):
    limits = []
    real = resource.setrlimit
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: (limits.append(pair), real(kind, pair)))
    before = resource.getrlimit(resource.RLIMIT_AS)
    with limited("{{ a }}"), limited("{{ b }}"), limited("{{ a }}"):
        assert resource.getrlimit(resource.RLIMIT_AS) != before
    assert len(limits) == 2
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with pytest.raises(ConfigurationError, match="powers"), limited("{{ a }}"), limited("{{ 9 ** 9 }}"):
        pass
    assert resource.getrlimit(resource.RLIMIT_AS) == before
