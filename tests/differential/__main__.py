"""python -m differential [options] [CASE ...]     CASE is a seed ("eager:17", "compiled:17") or the text of a case.

Without a case it runs a campaign. Run it in the folder `tests`, or with that folder on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings

from differential import case as cases
from differential.campaign import Count, campaign, found_before, judge_alone, seeds, shrunk, signature
from differential.case import Case
from differential.compare import Verdict
from differential.generate import generate


def _case(text: str) -> Case:
    if text.lstrip().startswith("{"):
        return cases.parse(text)
    kind, _, number = text.rpartition(":")
    return generate(int(number), kind or "eager")


def _table(kind: str, count: Count) -> str:
    total = sum(count.statuses.values())
    failed = {s: count.statuses[s] for s in ("refused wrongly", "accepted", "wrong", "crashed")}
    lines = [
        f"{kind}: {total} pipelines in {count.seconds:.0f} s ({total / max(count.seconds, 1e-9):.0f} a second): "
        + ", ".join(f"{count.statuses[s]} {s}" for s in ("right", "refused", "skipped", *failed))
    ]
    for name, counter in (("ops", count.ops), ("modes", count.modes), ("dtypes", count.dtypes), ("refused or skipped", count.reasons)):
        lines.append(f"  {name}: " + ", ".join(f"{key} {number}" for key, number in counter.most_common()))
    return "\n".join(lines)


def _one(text: str, shrinking: bool) -> bool:
    case = _case(text)
    verdict = judge_alone(case)
    print(cases.text_of(case))
    print(f"{verdict.status}: {verdict.text}")
    if verdict.is_failure and shrinking:
        case, verdict = shrunk(case, verdict, 60.0)
        print(f"smaller: {cases.text_of(case)}\n  {verdict.status}: {verdict.text}")
    return verdict.is_failure


def _shrink_all(count: Count, seconds: float) -> None:
    groups: dict[str, list] = {}
    for name, case, verdict in count.failures:
        groups.setdefault(signature(verdict), []).append((len(case["ops"]), name, case, verdict))
    for group in sorted(groups.values(), key=len, reverse=True):
        _, name, case, verdict = min(group, key=lambda entry: entry[0])
        alone = judge_alone(case)
        case, verdict = shrunk(case, verdict, seconds) if alone.is_failure else (case, Verdict(verdict.status, f"{verdict.text}, but not alone: a case before it did harm"))
        print(f"{len(group)} times, as in {name}: {verdict.status}: {verdict.text}\n  python -m differential '{cases.text_of(case)}'", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m differential", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--eager", type=int, default=0, help="pipelines to run eagerly")
    parser.add_argument("--compiled", type=int, default=0, help="pipelines to compile")
    parser.add_argument("--first", type=int, help="first seed; drawn where it is not given")
    parser.add_argument("--minutes", type=float, help="draw new seeds for so long, nine tenths of them eager")
    parser.add_argument("--found", action="store_true", help="first the cases of found.txt, which have failed before")
    parser.add_argument("--shrink-seconds", type=float, default=20.0)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    import differential.check  # noqa: F401  children inherit what is imported

    if chosen.case:
        return int(any([_one(text, not chosen.no_shrink) for text in chosen.case]))
    first = chosen.first if chosen.first is not None else random.SystemRandom().randrange(10**9)
    print(f"seeds from {first} on", flush=True)
    plans = [("eager", chosen.eager, None), ("compiled", chosen.compiled, None)]
    if chosen.minutes is not None:
        plans = [("eager", None, 54 * chosen.minutes), ("compiled", None, 6 * chosen.minutes)]
    failed = False
    if chosen.found:
        named = found_before()
        for kind in ("eager", "compiled"):
            chosen_ones = [(name, case) for name, case in named if (case["mode"].get("run") == "compile") == (kind == "compiled")]
            count = campaign(chosen_ones, kind, None, lambda line: print(line, flush=True))
            print(_table(f"found before, {kind}", count), flush=True)
            failed |= bool(count.failures)
    for kind, how_many, seconds in plans:
        if how_many == 0:
            continue
        until = None if seconds is None else time.monotonic() + seconds
        count = campaign(seeds(first, kind, how_many), kind, until, lambda line: print(line, flush=True))
        print(_table(kind, count), flush=True)
        failed |= bool(count.failures)
        if count.failures and not chosen.no_shrink:
            _shrink_all(count, chosen.shrink_seconds)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
