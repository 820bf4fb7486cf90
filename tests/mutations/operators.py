"""Mistakes that are planted mechanically in kernels: each operator finds the places in a source where it applies."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .code_text import tokens
from .kernel_copy import CSRC

Edit = tuple[int, int, str]
"""Token places of the first and the last token that are replaced, and the text in their place."""

WAIT = re.compile(r"(?!\w*sched)\w*barrier|wait_for_(?!scalars|arguments)\w+|__builtin_amdgcn_(?:fence|s_waitcnt)")
SCALE = re.compile(r"\w*scales?(?:_[ab])?")
SWAPPED = {"scale_a": "scale_b", "key_scale": "value_scale", "k_scale": "v_scale", "scale_a_row": "scale_b_row"}
SWAPPED |= {other: one for one, other in SWAPPED.items()}
BEFORE_CALLS = {"KERNEL", "alignas", "requires", "__attribute__", "decltype", "sizeof"}
CLOSERS = {"(": ")", "[": "]", "{": "}"}
ENDS = {"&&", "||", "?", ":", ";", ",", ")", "]", "}"}
CONSTANT = re.compile(r"k[A-Z]\w*|mma|wave|tile")
"""A name within a constant of compile time, such as mma::kTiles."""
INSIDE = re.compile(r"<|\w*in_bounds|\w*inside")


@functools.cache  # a cached property has a lock in Python 3.11, which a process may have when it is forked
def source_of(file: str) -> str:
    return (CSRC / file).read_text()


@dataclass(frozen=True)
class Mutant:
    """A source with one place changed by an operator."""

    name: str  # file:function:operator:ordinal
    file: str
    start: int
    end: int
    new: str

    @property
    def source(self) -> str:
        return source_of(self.file)

    @property
    def mutated(self) -> str:
        return self.source[: self.start] + self.new + self.source[self.end :]

    @property
    def change(self) -> str:
        line = self.source[self.source.rfind("\n", 0, self.start) + 1 : self.start] + "[" + self.source[self.start :]
        rest = line.partition("\n")[0].strip()
        return f"{rest} := {self.new}].".replace("|", "\\|")


class Code:
    """The tokens of a source, with the function of each."""

    def __init__(self, source: str, file: str):
        self.source, self.all = source, tokens(source, file)
        self.texts = [token.text for token in self.all]
        self.partner: dict[int, int] = {}  # of each bracket
        self.opener: list[int | None] = []  # the innermost bracket around each token
        self._pair()
        self.functions = self._functions()

    def _pair(self) -> None:
        stack = []
        for at, text in enumerate(self.texts):
            if stack and CLOSERS[self.texts[stack[-1]]] == text:
                self.partner[at] = stack.pop()
                self.partner[self.partner[at]] = at
            self.opener.append(stack[-1] if stack else None)
            if text in CLOSERS:
                stack.append(at)

    def _functions(self) -> list[str]:
        """Return the outermost function around each token, or nothing."""
        found, begin, at = [""] * len(self.all), 0, 0
        while at < len(self.all):
            if self.texts[at] in ";}":
                begin = at + 1
            elif self.texts[at] == "(":
                at = self.partner[at]
            elif self.texts[at] == "{":
                if name := self._name(begin, at):
                    last = self.partner[at]
                    found[at:last] = [name] * (last - at)
                    at = last
                begin = at + 1
            at += 1
        return found

    def _name(self, begin: int, end: int) -> str:
        """Return the function whose body begins at `end`: the first name before a parenthesis."""
        for at in range(begin, end - 1):
            if self.texts[at + 1] == "(" and self.texts[at] not in BEFORE_CALLS and self.texts[at].isidentifier():
                return self.texts[at]
        return ""

    def is_spaced(self, at: int) -> bool:
        """True for an operator of two values, as clang-format leaves white space around it alone."""
        token = self.all[at]
        return self.source[token.start - 1].isspace() and self.source[token.end : token.end + 1].isspace()

    def in_loop(self, at: int) -> bool:
        """True for a token between the parentheses of `for`."""
        return (opener := self.opener[at]) is not None and self.texts[opener - 1] == "for"

    def statement(self, at: int) -> tuple[int, int]:
        """Return the first token of the statement around a token, and the token that ends it."""
        first = last = at
        while first and self.texts[first - 1] not in ";{}":
            first = self.partner[first - 1] if self.texts[first - 1] in ")]" else first - 1
        while last < len(self.all) - 1 and self.texts[last] not in ";{}":
            last = self.partner.get(last, last) + 1 if self.texts[last] in "([" else last + 1
        return first, last

    def operand_end(self, at: int) -> int:
        """Return the last token of the operand that begins at a token: a name with members, indices and arguments."""
        while True:
            while at + 1 < len(self.all) and self.texts[at + 1] in "([":
                at = self.partner[at + 1]
            if self.texts[at + 1] not in (".", "->", "::"):
                return at
            at += 2

    def end(self, at: int) -> int:
        """Return the token that ends the condition, or the argument, in which a token is."""
        while self.texts[at] not in ENDS:
            at = self.partner[at] + 1 if self.texts[at] in CLOSERS else at + 1
        return at

    def has_scale(self, first: int, last: int) -> bool:
        return any(SCALE.fullmatch(text) for text in self.texts[first : last + 1])


def barrier(code: Code) -> Iterator[Edit]:
    """Remove a barrier or a wait."""
    for at, text in enumerate(code.texts):
        if WAIT.fullmatch(text) and code.texts[at + 1] == "(":
            last = code.partner[at + 1] + 1
            first = at
            while code.texts[first - 1] == "::":
                first -= 2
            if code.texts[last] == ";":
                yield first, last, ";"


def bound(code: Code) -> Iterator[Edit]:
    """Move a bound that is no constant by one: `<=` for `<`, and in loops also one step less."""
    for at, text in enumerate(code.texts):
        if text == "<" and code.is_spaced(at):
            end = code.end(at + 1)
            names = [one for one in code.texts[at + 1 : end] if one.isidentifier()]
            if all(CONSTANT.fullmatch(one) for one in names) and (names or code.in_loop(at)):
                continue
            yield at, at, "<="
            if code.in_loop(at):
                yield end, end, " - 1;"


def tail(code: Code) -> Iterator[Edit]:
    """Drop what handles the last, incomplete part: rounding up, a guard, or one of several conditions."""
    for at, text in enumerate(code.texts):
        if code.texts[at : at + 4] == ["-", "1", ")", "/"]:
            plus = at
            while plus > code.partner[at + 2] and code.texts[plus] != "+":
                plus = code.partner[plus] - 1 if code.texts[plus] in ")]" else plus - 1
            if code.texts[plus] == "+":
                yield plus, at + 1, ""
        elif text == "if" and code.texts[at + 1] == "(":
            last = code.partner[at + 1]
            if any(INSIDE.fullmatch(one) for one in code.texts[at + 2 : last]):
                yield at + 1, last, "(true)"
        elif text == "&&" and code.is_spaced(at):
            last = code.end(at + 1) - 1
            if any(INSIDE.fullmatch(one) for one in code.texts[at:last]):
                yield at, last, ""


def scale(code: Code) -> Iterator[Edit]:
    """Leave a scale out, apply it twice, or take another operand's."""
    for at, text in enumerate(code.texts):
        if text == "*" and code.is_spaced(at) and code.texts[at + 1].isidentifier():
            last = code.operand_end(at + 1)
            if code.has_scale(at + 1, last):
                operand = code.source[code.all[at + 1].start : code.all[last].end]
                yield at, last, ""
                yield at, last, f"* {operand} * {operand}"
        elif text == "*=":
            first, last = code.statement(at)
            if code.has_scale(at, last) and code.texts[last] == ";":
                yield first, last, ";"
        elif text in SWAPPED and code.texts[at + 1] != "=" and code.texts[at - 1] in (".", "->", "(", ",", "*", "["):
            yield at, at, SWAPPED[text]


OPERATORS: tuple[Callable[[Code], Iterator[Edit]], ...] = (barrier, bound, tail, scale)
COMPILE_TIME = {"constexpr", "static_assert", "template", "using", "#"}


def mutants(file: str) -> list[Mutant]:
    """Return all mutants of a file of csrc, in the order of their places."""
    code, found, counts = Code((CSRC / file).read_text(), file), [], {}
    edits = [(edit, operator.__name__) for operator in OPERATORS for edit in operator(code)]
    for (first, last, new), operator in sorted(edits, key=lambda one: (one[0][0], one[1])):
        function = code.functions[first]
        begin, _ = code.statement(first)
        if function and not COMPILE_TIME & set(code.texts[begin : last + 1]):
            of = f"{file}:{function}:{operator}"
            counts[of] = counts.get(of, 0) + 1
            span = code.all[first].start, code.all[last].end
            found.append(Mutant(f"{of}:{counts[of]}", file, *span, new))
    return found


def sources() -> list[str]:
    """Return the files of csrc that AMD's kernels of ops are built from. No op launches an all-reduce."""
    files = (path.relative_to(CSRC) for path in CSRC.rglob("*") if path.suffix in (".hip", ".h"))
    return sorted(file.as_posix() for file in files if not {"nvidia", "runtime", "collectives"} & {*file.parts})


def sample(found: Sequence, count: int) -> list:
    """Return `count` of a sequence, evenly spaced, or all."""
    return [found[(2 * at + 1) * len(found) // (2 * count)] for at in range(count)] if count < len(found) else [*found]
