"""What a run says at its end: a table, what went wrong and the faults around it; or all as JSON."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from chaos.faults import Kind
from chaos.ledger import Happened, Recovery, Tally, percentile, recoveries, totals
from chaos.orders import Manner
from chaos.run import Run

FAILED_SHOWN: Final = 20
PAUSES_SHOWN: Final = 10
PAUSE_S: Final = 10.0
"""Longer than any single fault lasts: worth a look, also where nothing was lost."""
AROUND_S: Final = 3.0
_FORM: Final = "{:<34} {}"


def summary(run: Run) -> dict[str, Any]:
    """Return the figures of a run."""
    found = totals(run.tallies)
    recovered = recoveries(run.happened, run.tallies)
    return {
        "seed": run.options.seed,
        "seconds": round(run.lasted_s, 1),
        "streams": run.options.streams,
        "tiers": "split" if run.options.split else "gateway",
        "faults": dict(_by_kind(run.happened)),
        "faults_total": len(run.happened),
        "requests": found.requests,
        "by_manner": found.by_manner,
        "tokens": found.tokens,
        "lost": found.lost,
        "repeated": found.repeated,
        "wrong": found.wrong,
        "run_twice": found.run_twice,
        "unanswered": found.unanswered,
        "errors": found.errors - len(run.given_up),
        "given_up": len(run.given_up),
        "resumed": found.resumed,
        "migrated": run.migrated,
        "started_in_vain": run.started_in_vain,
        "asked_again": found.asked_again,
        "left_over": run.left_over,
        "troubles": run.troubles,
        "rest_after_s": run.rest_after_s,
        "recovery_alone": _quantiles(each for each in recovered if each.alone),
        "recovery_all": _quantiles(recovered),
        "holds": holds(run),
    }


def holds(run: Run) -> bool:
    """Tell whether all that must hold does, the time of recovery included."""
    recovered = recoveries(run.happened, run.tallies)
    p99_s = percentile((each.took_s for each in recovered if each.alone), 0.99)
    return run.holds and (p99_s is None or p99_s <= run.options.recovery_s_max)


def text(run: Run) -> str:
    """Return the table, and below it all that is not as it must be."""
    figures = summary(run)
    lines = [_FORM.format("faults", figures["faults_total"])]
    lines += [_FORM.format(f"  {name}", count) for name, count in figures["faults"].items()]
    lines.append(_FORM.format("requests", figures["requests"]))
    lines += [_FORM.format(f"  {name}", count) for name, count in figures["by_manner"].items()]
    for name in ("tokens", "lost", "repeated", "wrong"):
        lines.append(_FORM.format(name, figures[name]))
    lines.append(_FORM.format("run twice for one key", figures["run_twice"]))
    lines.append(_FORM.format("without an answer", figures["unanswered"]))
    lines.append(_FORM.format("answered by an error", figures["errors"]))
    lines.append(_FORM.format("dead letters after three deaths", figures["given_up"]))
    lines.append(_FORM.format("resumed by their clients", figures["resumed"]))
    lines.append(_FORM.format("migrated to another worker", figures["migrated"]))
    lines.append(_FORM.format("started in vain", figures["started_in_vain"]))
    lines.append(_FORM.format("asked again", figures["asked_again"]))
    for what, name in (("", "recovery_alone"), (", other faults meanwhile", "recovery_all")):
        lines.append(
            _FORM.format("next token after kill -9 of a worker", _recovery(figures[name]) + what)
        )
    rest = figures["rest_after_s"]
    lines.append(_FORM.format("at rest", "never" if rest is None else f"after {rest:.1f} s"))
    lines += _pauses(run)
    lines += _failures(run)
    lines.append("holds" if figures["holds"] else "DOES NOT HOLD")
    return "\n".join(lines)


def _by_kind(happened: Iterable[Happened]) -> Counter[str]:
    order = {kind.value: number for number, kind in enumerate(Kind)}
    names = [f"{each.fault.kind.value} of {_tier(each.fault.target)}" for each in happened]
    return Counter(sorted(names, key=lambda name: (order[name.rpartition(" of ")[0]], name)))


def _tier(target: str) -> str:
    return target.partition("-")[0]


def _quantiles(recovered: Iterable[Recovery]) -> dict[str, Any]:
    took_s = [each.took_s for each in recovered]
    return {
        "streams": len(took_s),
        "p50_s": percentile(took_s, 0.5),
        "p99_s": percentile(took_s, 0.99),
        "max_s": max(took_s, default=None),
    }


def _recovery(figures: dict[str, Any]) -> str:
    if not figures["streams"]:
        return "no stream waited"
    return (
        f"p50 {figures['p50_s']:.2f} s, p99 {figures['p99_s']:.2f} s,"
        f" most {figures['max_s']:.2f} s of {figures['streams']} streams"
    )


def _pauses(run: Run) -> list[str]:
    """Say which streams waited longest for their next token."""
    pauses = sorted(
        (
            (end_s - begin_s, begin_s, end_s, tally)
            for tally in run.tallies
            for begin_s, end_s in tally.gaps
            if tally.order.manner is not Manner.WHOLE
        ),
        key=lambda pause: -pause[0],
    )
    return [
        f"  {tally.requests[-1]} waited {pause_s:.1f} s for a token,"
        f" from {begin_s - run.began_s:.2f} s to {end_s - run.began_s:.2f} s"
        for pause_s, begin_s, end_s, tally in pauses[:PAUSES_SHOWN]
        if pause_s > PAUSE_S
    ]


def _failures(run: Run) -> list[str]:
    lines = [f"NOT AT REST {name}: {number:g}" for name, number in run.left_over.items()]
    lines += [f"TROUBLE {trouble}" for trouble in run.troubles]
    failed = run.failed
    for tally in failed[:FAILED_SHOWN]:
        lines += _failure(run, tally)
    if len(failed) > FAILED_SHOWN:
        lines.append(f"and {len(failed) - FAILED_SHOWN} more")
    return lines


def _failure(run: Run, tally: Tally) -> list[str]:
    order = tally.order
    end = "never" if tally.ended_s is None else f"{tally.ended_s - run.began_s:.2f} s"
    lines = [
        f"FAILED {order.name} ({order.manner.value}, {order.path}), asked at"
        f" {tally.began_s - run.began_s:.2f} s, ended {end}",
        f"  requests: {', '.join(tally.requests) or 'none was accepted'}",
        f"  had {tally.tokens} of {tally.expected.tokens} tokens, last id {tally.last_id},"
        f" resumed {tally.resumed} times",
    ]
    if tally.error is not None:
        lines.append(f"  error: {tally.error}")
    lines += [f"  {surprise}" for surprise in tally.surprises]
    until_s = run.began_s + run.lasted_s if tally.ended_s is None else tally.ended_s
    for each in sorted(run.happened, key=lambda each: each.began_s):
        if each.began_s <= until_s + AROUND_S and each.mended_s >= tally.began_s - AROUND_S:
            lines.append(
                f"  {each.began_s - run.began_s:8.2f} s {each.fault.kind.value} of"
                f" {each.fault.target}, well again at {each.mended_s - run.began_s:.2f} s"
            )
    return lines


def write_failures(run: Run, folder: Path) -> None:
    """Write the report beside the processes' logs."""
    (folder / "report.txt").write_text(text(run) + "\n")
