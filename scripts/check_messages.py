"""Fails when an error message says not both what was expected and what was got.

Reads each TORCH_CHECK_VALUE, TORCH_CHECK_TYPE and TORCH_CHECK_NOT_IMPLEMENTED below src/, include/ and cli/, and what is raised with a text
below python/. Prints how many of the messages no file below tests/ mentions: a message counts as mentioned when a string of a test and one of
its own share SHARED characters in a row, or when one of them, of at least MIN_PIECE, is all in the other. With --list prints those messages too.

Usage: check_messages.py [--list] [ROOT]
"""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

MIN_PIECE = 12
SHARED = 24
CHECK = re.compile(r"\bTORCH_CHECK_(?:VALUE|TYPE|NOT_IMPLEMENTED)\s*\(")
# Comments, raw strings, strings and characters: what else a text holds is code.
TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<tag>[^()\\\s]*)\((?P<raw>.*?)\)(?P=tag)"|"(?P<text>(?:[^"\\\n]|\\.)*)"|'(?:[^'\\\n]|\\.)'""",
    re.DOTALL,
)
PYTHON_STRING = re.compile(r"""[rbf]{0,2}("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')""")
SOURCES = {".cpp", ".h", ".cu", ".cuh"}


@dataclass(frozen=True)
class Message:
    place: str
    pieces: tuple[str, ...]  # its string literals, adjacent ones joined

    @property
    def text(self) -> str:
        return " ... ".join(self.pieces)


def blank(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def without_comments(source: str) -> str:
    """`source` with its comments blanked, so that positions and lines stay."""
    return TOKEN.sub(lambda match: blank(match) if match[0].startswith("/") else match[0], source)


def split_call(source: str, start: int) -> tuple[int, int]:
    """Positions of the first top-level comma and of the closing parenthesis of the call whose arguments begin at `start`."""
    depth, comma, position = 0, -1, start
    while position < len(source):
        literal = TOKEN.match(source, position)
        if literal:
            position = literal.end()
            continue
        character = source[position]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            if depth == 0:
                return comma, position
            depth -= 1
        elif character == "," and depth == 0 and comma < 0:
            comma = position
        position += 1
    raise ValueError("expected a closing parenthesis, got the end of the file")


def literals(code: str) -> list[str]:
    """The string literals in `code`, those with only space between them joined."""
    pieces: list[str] = []
    end = -1
    for match in TOKEN.finditer(code):
        if match["text"] is None and match["raw"] is None:
            continue
        piece = match["raw"] if match["raw"] is not None else unescape(match["text"])
        if end >= 0 and not code[end : match.start()].strip():
            pieces[-1] += piece
        else:
            pieces.append(piece)
        end = match.end()
    return pieces


def messages_of(path: Path, name: str) -> list[Message]:
    source = without_comments(path.read_text(encoding="utf-8"))
    found = []
    for match in CHECK.finditer(source):
        if source[: match.start()].rsplit("\n", 1)[-1].lstrip().startswith("#"):
            continue
        comma, end = split_call(source, match.end())
        pieces = literals(source[comma + 1 : end]) if comma >= 0 else []
        found.append(Message(f"{name}:{source.count(chr(10), 0, match.start()) + 1}", tuple(pieces)))
    return found


def python_messages_of(path: Path, name: str) -> list[Message]:
    """What is raised with a text; a text that a function makes is the function's."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
            continue
        text = node.exc.args[0]
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        pieces = tuple(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
        if " " in "".join(pieces):  # else it is a name
            found.append(Message(f"{name}:{node.lineno}", pieces))
    return found


def files_below(root: Path, folders: list[str], suffixes: set[str]) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*") if path.suffix in suffixes)


def test_strings(root: Path) -> list[str]:
    strings = []
    for path in files_below(root, ["tests"], SOURCES | {".py"}):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            strings += [unescape(match[1][1:-1]) for match in PYTHON_STRING.finditer(text)]
        else:
            strings += literals(without_comments(text))
    return [string for string in strings if len(string) >= MIN_PIECE]


def runs_of(text: str) -> set[str]:
    return {text[start : start + SHARED] for start in range(len(text) - SHARED + 1)}


def is_mentioned(message: Message, strings: list[str], runs: set[str]) -> bool:
    pieces = [piece for piece in message.pieces if len(piece) >= MIN_PIECE]
    if message.pieces and not pieces:  # what it says is what it fills in
        return True
    return any(not runs.isdisjoint(runs_of(piece)) or any(piece in string or string in piece for string in strings) for piece in pieces)


def main(root: Path, list_them: bool) -> int:
    messages = [
        message
        for path in files_below(root, ["src", "include", "cli"], SOURCES)
        for message in messages_of(path, str(path.relative_to(root)))
    ]
    for path in files_below(root, ["python"], {".py"}):
        messages += python_messages_of(path, str(path.relative_to(root)))
    failures = 0
    for message in messages:
        lacking = [word for word in ("expected", "got") if not re.search(rf"\b{word}\b", message.text)]
        if lacking:
            failures += 1
            print(
                f"check_messages: {message.place}: expected the words \"expected\" and \"got\", got no "
                f"{' and no '.join(lacking)} in: {message.text or '(no text)'}",
                file=sys.stderr,
            )
    strings = test_strings(root)
    runs = set().union(*map(runs_of, strings))
    untested = [message for message in messages if not is_mentioned(message, strings, runs)]
    if list_them:
        for message in untested:
            print(f"check_messages: no test mentions {message.place}: {message.text}")
    print(f"check_messages: {len(messages)} messages, {failures} incomplete, {len(untested)} that no test mentions")
    return 1 if failures else 0


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--list"]
    root = Path(arguments[0] if arguments else Path(__file__).parent.parent)
    sys.exit(main(root.resolve(), "--list" in sys.argv[1:]))
