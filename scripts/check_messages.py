"""Fails if an error message does not say both what was expected and what was got, or if no test mentions it.

Reads each TORCH_CHECK_VALUE, TORCH_CHECK_TYPE and TORCH_CHECK_NOT_IMPLEMENTED below src/, include/, apps/ and cli/, and each exception that is raised
with a text below python/. A test mentions a message if a string of the test and a string of the message share SHARED characters in a row, or if
one of these strings, of at least MIN_PIECE characters, contains the other.

Usage: check_messages.py [ROOT]
"""

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

MIN_PIECE = 12
SHARED = 24
# Messages that no test can cause: they need another build of torch than the tested one.
UNREACHABLE = ("got one that is built without torch.distributed",)
REGEX_ESCAPE = re.compile(r"\\([^\w\s])")
CHECK = re.compile(r"\bTORCH_CHECK_(?:VALUE|TYPE|NOT_IMPLEMENTED)\s*\(")
# Comments, raw strings, strings and characters. The rest of a source is code.
TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<tag>[^()\\\s]*)\((?P<raw>.*?)\)(?P=tag)"|"(?P<text>(?:[^"\\\n]|\\.)*)"|'(?:[^'\\\n]|\\.)'""",
    re.DOTALL,
)
PYTHON_STRING = re.compile(r"""[rbf]{0,2}("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')""")
SOURCES = {".cpp", ".h"}


@dataclass(frozen=True)
class Message:
    place: str
    pieces: tuple[str, ...]  # the string literals of the message; adjacent ones are joined

    @property
    def text(self) -> str:
        return " ... ".join(self.pieces)


def blank(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def without_comments(source: str) -> str:
    """`source` with its comments replaced by spaces, so that positions and lines stay."""
    return TOKEN.sub(lambda match: blank(match) if match[0].startswith("/") else match[0], source)


def split_call(source: str, start: int) -> tuple[int, int]:
    """The positions of the first top-level comma and of the closing parenthesis of the call whose arguments begin at `start`."""
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
    """The string literals in `code`. Literals separated only by space and commas are joined, because as arguments they form one text."""
    pieces: list[str] = []
    end = -1
    for match in TOKEN.finditer(code):
        if match["text"] is None and match["raw"] is None:
            continue
        piece = match["raw"] if match["raw"] is not None else unescape(match["text"])
        if end >= 0 and not code[end : match.start()].strip(" \n,"):
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
    """The messages of exceptions that are raised with a text. A text that a function returns belongs to the function."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
            continue
        text = node.exc.args[0]
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        pieces = tuple(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
        if " " in "".join(pieces):  # a text without a space is a name
            found.append(Message(f"{name}:{node.lineno}", pieces))
    return found


def files_below(root: Path, folders: list[str], suffixes: set[str]) -> list[Path]:
    return sorted(path for folder in folders for path in (root / folder).rglob("*") if path.suffix in suffixes)


def test_strings(root: Path) -> list[str]:
    strings = []
    for path in files_below(root, ["tests"], SOURCES | {".py"}):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            found = [unescape(match[1][1:-1]) for match in PYTHON_STRING.finditer(text)]
            strings += [REGEX_ESCAPE.sub(r"\1", part) for string in found for part in string.split(".*")]  # pytest takes regular expressions
        else:
            strings += literals(without_comments(text))
    strings += [string.partition(": ")[2] for string in strings]  # the name of the op is often not part of the literal
    return [string for string in strings if len(string) >= MIN_PIECE]


def runs_of(text: str) -> set[str]:
    return {text[start : start + SHARED] for start in range(len(text) - SHARED + 1)}


def is_mentioned(message: Message, strings: list[str], runs: set[str]) -> bool:
    pieces = [piece for piece in message.pieces if len(piece) >= MIN_PIECE]
    if message.pieces and not pieces:  # the message consists of values only
        return True
    return any(not runs.isdisjoint(runs_of(piece)) or any(piece in string or string in piece for string in strings) for piece in pieces)


def main(root: Path) -> int:
    messages = [
        message
        for path in files_below(root, ["src", "include", "apps", "cli"], SOURCES)
        for message in messages_of(path, str(path.relative_to(root)))
    ]
    for path in files_below(root, ["python"], {".py"}):
        messages += python_messages_of(path, str(path.relative_to(root)))
    problems = []
    for message in messages:
        lacking = [word for word in ("expected", "got") if not re.search(rf"\b{word}\b", message.text)]
        if lacking:
            problems.append(
                f"{message.place}: expected the words \"expected\" and \"got\", got no {' and no '.join(lacking)} in: {message.text or '(no text)'}"
            )
    strings = test_strings(root)
    runs = set().union(*map(runs_of, strings))
    for message in messages:
        if not is_mentioned(message, strings, runs) and not any(text in message.text for text in UNREACHABLE):
            problems.append(f"{message.place}: expected a test of the text, got none that mentions: {message.text}")
    for problem in problems:
        print(f"check_messages: {problem}", file=sys.stderr)
    print(f"check_messages: {len(messages)} messages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()))
