"""What the pages of the docs show."""

import re


def blocks_of(page, languages="python|toml|yaml"):
    """The code blocks of a page in these languages, in order."""
    return re.findall(rf"^```(?:{languages})\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
