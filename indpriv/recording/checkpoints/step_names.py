"""Steps of checkpoints by their file names: after the word step, or as the user says. Public.

Any other number in a name may count epochs, seeds or anything else, and is never read as a step.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from indpriv.errors import InputError

STEP_OF = "--set step_of"
MAX_STEP = 10**12
# 1.5, 10k and 1e5 are not numbers of steps, and a step beside an epoch may be one of that epoch.
_STEP = re.compile(r"(?ai)(?<![a-z])(?:global)?steps?[-_=. ]?([0-9]{1,12})(?![0-9a-z]|[.,][0-9])")
_PART = re.compile(r"(?ai)(?<![a-z0-9])(?:epochs?|ep|e|rounds?)[-_=. ]?[0-9]")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def step_in_name(name: str) -> int | None:
    """The only number after the word step; None if there is none, or beside an epoch."""
    found = set(_STEP.findall(name))
    return int(found.pop()) if len(found) == 1 and not _PART.search(name) else None


def steps_said(rules: str | Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Step of each name that a rule matches; InputError at one that cannot be followed."""
    said: dict[str, int] = {}
    for rule in ",".join([rules] if isinstance(rules, str) else rules).split(","):
        pattern, tree = _parsed(rule)
        matches = [(name, found) for name in names if (found := pattern.fullmatch(name))]
        if not matches:
            raise InputError(
                f"{STEP_OF} {rule!r} matches none of the checkpoints {listed(names)}; write e.g. "
                f"{what_to_type(names)} (names without their folder)"
            )
        for name, found in matches:
            step = _value(tree, {word: int(number) for word, number in found.groupdict().items()})
            if not 0 <= step <= MAX_STEP or said.setdefault(name, step) != step:
                other = f", and {said[name]} by another rule" if name in said else ""
                raise InputError(
                    f"{STEP_OF} {rule!r}: {name!r} would be of step {str(step)[:20]}{other}; say "
                    f"how many updates the model has had, once, from 0 to {MAX_STEP}"
                )
    return said


def _parsed(rule: str) -> tuple[re.Pattern[str], ast.expr]:
    """Pattern of names and expression of a step, of a rule such as "model_{epoch}.pt=20*epoch"."""
    name, _, expression = rule.rpartition("=")
    name, expression = name.strip(), expression.strip()
    text = re.sub(r"(?a)\\{([A-Za-z]\w*)\\}", r"(?P<\1>[0-9]{1,18})", re.escape(name))
    try:
        clear = name and not re.search(r"\\[{}]|\)\(", text)  # no other braces, and none touch
        if not (clear and re.fullmatch("[A-Za-z0-9_+*() -]{1,100}", expression)):
            raise ValueError
        pattern, tree = re.compile(text), ast.parse(expression, mode="eval").body
        _value(tree, dict.fromkeys(pattern.groupindex, 0))
    except (ValueError, SyntaxError, re.error):
        raise InputError(
            f"{STEP_OF} {rule[:200]!r} is not FILE=STEP with a STEP of digits, +, -, *, ( ) and "
            "names that stand in {} for a number of FILE; write e.g. "
            f'{STEP_OF}="model_{{epoch}}.pt=20*epoch" or {STEP_OF}="model_a.pt=0,model_b.pt=20"'
        ) from None
    return pattern, tree


def _value(tree: ast.expr, numbers: Mapping[str, int]) -> int:
    """Value of an expression; ValueError at anything but whole numbers, names, +, - and *."""
    match tree:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.Name(id=name) if name in numbers:
            return numbers[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, numbers)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return int(_OPERATIONS[type(op)](_value(left, numbers), _value(right, numbers)))
    raise ValueError


def listed(names: Sequence[str]) -> str:
    """The first names, with control characters escaped."""
    return ", ".join(map(repr, names[:3])) + ", ..." * (len(names) > 3)


def what_to_type(names: Sequence[str]) -> str:
    """An example of rules: numbers that differ in the commonest kind of name are in braces."""
    names = [name for name in names if re.fullmatch(r"\w([\w.=+@ -]*\w)?", name)] or ["FILE"]
    kinds = [re.sub("[0-9]+", "#", name) for name in names]
    kind = Counter(kinds).most_common(1)[0][0]
    alike = [name for name, its in zip(names, kinds, strict=True) if its == kind]
    text, *rest = re.split("[0-9]+", alike[0])
    columns = zip(*(re.findall("[0-9]+", name) for name in alike), strict=True)
    for column, after in zip(columns, rest, strict=True):
        word = "step" if re.search(r"(?i)steps?[^a-z]?$|^checkpoint-$", text) else "epoch"
        word = f"n{len(text)}" if f"{{{word}}}" in text else word
        text += (f"{{{word}}}" if len({*column}) > 1 else column[0]) + after
    if "{" not in text:
        text = ",".join(f"{name}={20 * i}" for i, name in enumerate(names[:3], len(names) == 1))
        return f'{STEP_OF}="{text}"'
    if "{step}" in text:
        return f'{STEP_OF}="{text}=step"'
    more = "if an epoch has 20 steps, and 20*(epoch+1) if its model was saved after them"
    return f'{STEP_OF}="{text}=20*epoch" {more}'
