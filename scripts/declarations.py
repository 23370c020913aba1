"""Reads the declarations and definitions of C++ files at namespace scope and in classes. It reads tokens without a compiler, so it is fast.

It understands only what this project writes: no macros that open scopes, no declarations of several names, no K&R style.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

# Comments, literals and preprocessor lines are skipped: braces in them must not count.
_SILENT = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'(?!\w)|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M
)
_TOKEN = re.compile(r"::|->|\[\[|\]\]|[A-Za-z_~]\w*|\S")
_CLASS = {"struct", "class", "union", "enum"}
_NO_DECLARATION = {"using", "typedef", "static_assert", "friend", "public", "private", "protected"}
_NOT_A_NAME = {"const", "noexcept", "override", "final", "requires", "if", "for", "while", "switch", "return", "decltype", "alignas", "__attribute__"}


@dataclass(frozen=True)
class Name:
    """A class, function or variable, with its namespaces and classes. A function has its number of parameters too, so that most overloads differ."""

    path: str
    parameters: int | None = None

    def __str__(self) -> str:
        return self.path if self.parameters is None else f"{self.path}()"


@dataclass
class Declarations:
    """The declarations and definitions of one file. A definition does not count as a declaration."""

    declared: set[Name] = field(default_factory=set)
    defined: set[Name] = field(default_factory=set)


def read(path: Path) -> Declarations:
    text = _SILENT.sub(lambda found: " " if found[0].startswith(("/", "#")) or found[0].lstrip().startswith("#") else ' "" ', path.read_text(encoding="utf-8"))
    return _Reader(_TOKEN.findall(text)).found


class _Reader:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.at, self.found = tokens, 0, Declarations()
        self._scope("")

    def _skip(self, opening: str, closing: str) -> None:
        """Skips the tokens up to and including the bracket that closes the one just read."""
        depth = 1
        while depth and self.at < len(self.tokens):
            depth += {opening: 1, closing: -1}.get(self.tokens[self.at], 0)
            self.at += 1

    def _scope(self, path: str) -> None:
        """Reads to the end of a namespace or class."""
        statement: list[str] = []
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            if token == "}":
                return
            if token == ";":
                self._ends(statement, path)
                statement = []
            elif token == ":" and statement in (["public"], ["private"], ["protected"]):
                statement = []
            elif token == "(":
                start = self.at
                self._skip("(", ")")
                statement += ["(", *self.tokens[start : self.at]]
            elif token == "{":
                statement = self._opens(statement, path)
            else:
                statement.append(token)

    def _opens(self, statement: list[str], path: str) -> list[str]:
        """Reads from an opening brace on, and returns the words of the statement that continues after the closing brace."""
        words = _without_template(statement)
        if words[:1] == ["extern"] and words[1:] == ['"', '"']:
            self._scope(path)
        elif "namespace" in words[:2]:
            if names := [word for word in words[words.index("namespace") + 1 :] if word not in ("::", "inline")]:
                self._scope("::".join([*([path] if path else []), *names]))
            else:
                self._skip("{", "}")  # an unnamed namespace is not visible elsewhere
        elif words and words[0] in _CLASS and "(" not in words[: words.index("<") if "<" in words else None]:
            name = _class_name(words)
            self.found.defined.add(Name(_join(path, name)))
            if words[0] == "enum":
                self._skip("{", "}")
            else:
                self._scope(_join(path, name))
            return ["type"]  # a variable of this type may follow
        elif function := _function(words, path):
            self.found.defined.add(function)
            if _has_initializers(words):  # each initializer of a constructor has brackets of its own
                self._skip("{", "}")
                while self.tokens[self.at : self.at + 1] in ([","], ["{"]):
                    self._skip_to_brace()
            else:
                self._skip("{", "}")
                while self.tokens[self.at : self.at + 1] == ["catch"]:  # the body is a try block
                    self._skip_to_brace()
        else:
            self._skip("{", "}")
            return [*statement, "{"]
        return []

    def _skip_to_brace(self) -> None:
        while self.tokens[self.at] != "{":
            self.at += 1
        self.at += 1
        self._skip("{", "}")

    def _ends(self, statement: list[str], path: str) -> None:
        words = _without_template(statement)
        if not words or words[0] in _NO_DECLARATION or words[0] == "type":
            return
        if words[0] in _CLASS and len(words) == 2:
            self.found.declared.add(Name(_join(path, words[1])))
        elif function := _function(words, path):
            is_defined = words[-2:] in (["=", "default"], ["=", "delete"], ["=", "0"]) or "constexpr" in words
            (self.found.defined if is_defined else self.found.declared).add(function)
        elif name := _variable(words):
            (self.found.declared if "extern" in words else self.found.defined).add(Name(_join(path, name)))


def _join(path: str, name: str) -> str:
    return f"{path}::{name}" if path else name


def _without_template(words: list[str]) -> list[str]:
    """The words without leading `template <...>` and attributes."""
    words = _without_attributes(words)
    while words[:1] == ["template"]:
        depth, end = 0, 1
        while end < len(words):
            depth += {"<": 1, ">": -1}.get(words[end], 0)
            end += 1
            if depth == 0:
                break
        words = words[end:]
    return words


def _without_attributes(words: list[str]) -> list[str]:
    kept, skipping = [], 0
    for position, word in enumerate(words):
        if word == "[[" or word == "]]":
            skipping += 1 if word == "[[" else -1
        elif word == "__attribute__":
            skipping += 1
        elif skipping and word == ")" and words[position - 1] == ")":
            skipping -= 1
        elif not skipping:
            kept.append(word)
    return kept


def _class_name(words: list[str]) -> str:
    """The name of a class from words such as `struct TANDEM_API Name final : Base`."""
    head = words[1:]
    for end, word in enumerate(head):
        if word in (":", "final", "<"):
            head = head[:end]
            break
    return "".join(word for word in head if word not in ("class", "struct") and not word.isupper())  # upper-case words are macros


def _top_level(words: list[str]) -> list[tuple[int, str]]:
    """The words outside of brackets, each with its position."""
    found, depth = [], 0
    for position, word in enumerate(words):
        if word == "(":
            if depth == 0:
                found.append((position, word))
            depth += 1
        elif word == ")":
            depth -= 1
        elif depth == 0:
            found.append((position, word))
    return found


def _function(words: list[str], path: str) -> Name | None:
    angle = 0
    for position, word in _top_level(words):
        if word == "=" and words[position - 1] != "operator":
            return None  # a variable
        if "operator" in words[:position] and word != "(":
            continue
        if word in "<>":
            angle += 1 if word == "<" else -1
        if word != "(" or angle > 0 or position == 0:
            continue
        name = words[position - 1]
        if "operator" in words[:position]:
            name = "".join(words[words.index("operator") : position])
            start = words.index("operator")
        elif not re.match(r"[A-Za-z_~]", name) or name in _NOT_A_NAME or words[position + 1] == "*":  # a pointer to a function
            continue
        else:
            start = position - 1
        while start >= 2 and words[start - 1] == "::":
            name = f"{words[start - 2]}::{name}"
            start -= 2
        if start == 0 and "::" not in name and path.rpartition("::")[2] not in (name, name[1:]):
            return None  # a call of a macro
        return Name(_join(path, name), _count(words[position + 1 :]))
    return None


def _count(words: list[str]) -> int:
    """The number of parameters before the closing bracket."""
    depth, angle, count, is_empty = 0, 0, 1, True
    for word in words:
        if word == ")" and depth == 0:
            break
        is_empty = False
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(word, 0)
        angle += {"<": 1, ">": -1}.get(word, 0)
        count += word == "," and depth == 0 and angle == 0
    return 0 if is_empty else count


def _has_initializers(words: list[str]) -> bool:
    closes = len(words) - 1 - words[::-1].index(")") if ")" in words else 0
    return any(word == ":" for _, word in _top_level(words)) and words[-1] not in (")", "}") and closes < len(words) - 1


def _variable(words: list[str]) -> str | None:
    end = next((position for position, word in _top_level(words) if word in ("=", "{", "[", "(")), len(words))
    return words[end - 1] if end >= 2 and re.match(r"[A-Za-z_]", words[end - 1]) else None
