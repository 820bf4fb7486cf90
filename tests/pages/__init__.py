"""Generate the pages of the documentation, and read them in tests."""

import re


def block_of(text: str, language: str) -> str:
    """Return the only code block in this language."""
    [block] = re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return block
