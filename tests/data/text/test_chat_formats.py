import json

import pytest

from lit_efficient.data.text.chat_formats import MalformedRow, read_row, recognise
from lit_efficient.data.text.python_instructions import functions_of, instructions
from lit_efficient.errors import ConfigurationError

ASK, ANSWER = {"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Answer"}

ROWS = {
    "messages": {"messages": [ASK, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Ask"}, {"from": "gpt", "value": "Answer"}]},
    "alpaca": {"instruction": "Ask", "input": "", "output": "Answer"},
}


@pytest.mark.parametrize("kind", ROWS)
def test_conversations_of_every_format_are_the_same(kind: str) -> None:
    found, sentence = recognise([ROWS[kind]], "data.jsonl")
    assert found == kind
    assert sentence.startswith(f"data.jsonl: format {kind}, by the keys ")
    assert read_row(ROWS[kind], found).messages == (ASK, ANSWER)


def test_texts_and_completions() -> None:
    assert recognise([{"text": "x"}], "t")[0] == "text"
    assert read_row({"text": "x y"}, "text").text == "x y"
    row = {"prompt": "Ask:", "completion": " Answer"}
    assert recognise([row], "t")[0] == "completion"
    document = read_row(row, "completion")
    assert (document.text, document.given) == ("Ask: Answer", 4)
    assert read_row({"prompt": [ASK], "completion": [ANSWER]}, "completion").messages == (ASK, ANSWER)


def test_two_formats_at_once_are_said() -> None:
    kind, sentence = recognise([{"text": "rendered", "messages": [ASK, ANSWER]}], "export.parquet")
    assert kind == "messages"
    assert sentence.endswith("(set format to read it as text)")


def test_a_few_odd_rows_do_not_decide() -> None:
    assert recognise([{"note": 1}, {"text": None, "messages": [ASK]}, {"messages": [ASK]}], "t")[0] == "messages"


def test_unknown_keys_are_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"no format has the keys \['question', 'reply'\].*columns"):
        recognise([{"question": "a", "reply": "b"}], "data.jsonl")


def test_alpaca_has_an_input_and_roles_have_many_names() -> None:
    assert read_row({"instruction": "Add", "input": "2, 2", "output": "4"}, "alpaca").messages[0]["content"] == (
        "Add\n\n2, 2"
    )
    turns = [
        {"from": "system", "value": "S"},
        {"from": "Human", "value": "U"},
        {"from": "function_response", "value": "F"},
    ]
    row = {"conversations": [*turns, {"from": "GPT", "value": "A"}]}
    assert [m["role"] for m in read_row(row, "sharegpt").messages] == ["system", "user", "tool", "assistant"]


def test_what_arrow_fills_in_is_left_out_and_tools_are_kept() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    row = {"messages": [{**ASK, "tool_calls": None, "name": None}, call], "tools": [{"name": "f"}]}
    document = read_row(row, "messages")
    assert document.messages == (ASK, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]})
    assert document.tools == ({"name": "f"},)
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "sk"}]}]}
    assert read_row({"messages": [*parts["messages"], ANSWER]}, "messages").messages[0] == ASK


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        ("messages", {"messages": []}, "messages is empty"),
        ("messages", {"other": 1}, "no messages"),
        ("messages", {"messages": [ASK]}, "no turn has the role assistant"),
        ("messages", {"messages": [ASK, {**ANSWER, "content": " "}]}, "all assistant turns are empty"),
        ("messages", {"messages": [{"role": "wizard", "content": "x"}]}, "the role 'wizard'"),
        ("messages", {"messages": [{"role": "user", "content": 3}]}, "its content is a int"),
        ("messages", {"messages": ["hello"]}, r"messages\[0\] is a str, not a turn"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "a part that is no text"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ANSWER]},
            r"messages\[0\] holds a part of the type 'image_url', and only text is read",
        ),
        ("messages", {"messages": [ASK, ANSWER], "images": ["a.png"]}, "holds images .* only text is read"),
        ("messages", {"messages": [{**ASK, "train": True}, ANSWER]}, "train: true and the role user"),
        ("messages", {"messages": [ASK, {**ANSWER, "train": True, "weight": 0}]}, "train: True and the weight 0"),
        ("messages", {"messages": [ASK, {**ANSWER, "training": "no"}]}, "training: 'no', which must be true"),
        ("messages", {"messages": [ASK, {**ANSWER, "weight": 0}]}, "turns have weight 0"),
        ("messages", {"messages": [ASK, {**ANSWER, "weight": 0.5}]}, r"messages\[1\] has the weight 0.5"),
        ("alpaca", {"instruction": "x", "output": ""}, "output is empty"),
        ("alpaca", {"instruction": "x", "output": "y", "input": 3}, "input is a int"),
        ("completion", {"prompt": "x", "completion": [ANSWER]}, "both must be of one kind"),
        ("completion", {"prompt": 3, "completion": "y"}, "prompt is a int, not text"),
        ("text", {"text": 3}, "text is a int"),
    ],
)
def test_malformed_rows_have_a_reason(kind, row, reason) -> None:
    with pytest.raises(MalformedRow, match=reason):
        read_row(row, kind)


def test_instructions_from_the_standard_library() -> None:
    rows = instructions()
    assert 1900 <= len(rows) <= 2000  # Python 3.13 has no more
    assert rows == json.loads(json.dumps(rows))
    answers = [read_row(row, "messages").messages[1]["content"] for row in rows]
    assert len(set(answers)) == len(answers)
    assert all(30 <= len(answer) <= 600 for answer in answers)


def test_functions_of_a_module() -> None:
    source = (
        'class A:\n    def double(self, x: int = 2) -> int:\n        """Twice."""\n        doubled = 2 * x  # double\n'
        "        return doubled\n\n    def silent(self):\n        return 1\n"
    )
    assert list(functions_of(source)) == [
        ('def double(self, x: int=2) -> int:\n    """Twice."""', "doubled = 2 * x  # double\nreturn doubled")
    ]
    assert list(functions_of("def broken(:")) == []


def test_tools_may_be_the_text_of_a_list() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"messages": turns, "tools": '[{"name": "f"}]'}
    assert read_row(row, "messages").tools == ({"name": "f"},)
    assert read_row({**row, "tools": ""}, "messages").tools == ()
    for wrong, message in (("[", "tools is a text that is no JSON"), ('{"name": "f"}', "tools is .*, not a list")):
        with pytest.raises(MalformedRow, match=message):
            read_row({**row, "tools": wrong}, "messages")
