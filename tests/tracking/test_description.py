from runner.system.text_lines import figures
from runner.tracking.description import code, describe


def test_a_description_is_a_list_of_what_there_is_to_say():
    facts = {"recipe": code("marl"), "overridden": code(), "result": figures({"eval/return": 874.43, "ms": 0.000012})}
    assert describe(facts) == "* **recipe**: `marl`\n* **result**: eval/return 874.4, ms 1.2e-05"


def test_code_is_a_row_of_texts():
    assert code("a=1", "b={c: d}") == "`a=1`, `b={c: d}`"
