"""The pages of the documentation: what writes them, and what tests take from them."""

import re


def block_of(text: str, language: str) -> str:
    """The one block of code in this language."""
    [block] = re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return block
