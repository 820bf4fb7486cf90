"""What tests take from the pages of the documentation."""

import re


def block_of(text: str, language: str) -> str:
    """The one block of code in this language."""
    [block] = re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return block
