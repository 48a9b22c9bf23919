"""What waits in ingress, beside what stands in the queue. Rule: the two are never added up.

The broker knows nothing of these requests. So they are shown with the number of nodes that
answered, and where none did, what waits is said to be unknown rather than nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from headrace.backlog import By, in_order, printable
from schemas.model import WorkerEntry
from schemas.waiting import Count, CountAnswer, Mark, Place, add

OTHERS: Final = "(others)"
NO_ANSWER: Final = "no ingress node answered: what waits there is not known"


@dataclass(frozen=True, slots=True)
class InIngress:
    """The answers of the nodes, summed up; `marks` by model."""

    nodes: int = 0
    total: Count = field(default_factory=Count)
    rows: Mapping[str, Count] = field(default_factory=dict)
    rest: Count = field(default_factory=Count)
    classes: Mapping[str, Count] = field(default_factory=dict)
    marks: Mapping[str, Mark] = field(default_factory=dict)

    def as_json(self, by: By) -> dict[str, Any]:
        """Return the member `ingress` of `--json`; docs/backlog.schema.json describes it."""
        answered = self.nodes > 0
        return {
            "nodes": self.nodes,
            "rows": [{by.value: name, **_plain(row)} for name, row in self.rows.items()],
            "rest": _plain(self.rest) if answered else None,
            "total": _plain(self.total) if answered else None,
            "classes": [{"class": name, **_plain(row)} for name, row in self.classes.items()],
        }


class Force(NamedTuple):
    """A model's live workers and the requests that they run at once; `watermark` is None where no
    ingress node told it."""

    workers: int
    slots: int
    watermark: int | None


def summed(answers: Sequence[CountAnswer], by: By) -> InIngress:
    """Sum the nodes' answers up. A name that is among the largest of one node only has the rest of
    its requests in `rest`."""
    rows: dict[str, Count] = {}
    classes: dict[str, Count] = {}
    marks: dict[str, Mark] = {}
    total = rest = Count()
    for answer in answers:
        total, rest = add(total, answer.total), add(rest, answer.rest)
        for name, row in answer.rows.items():
            rows[name] = add(rows.get(name, Count()), row)
        for name, row in answer.classes.items():
            classes[name] = add(classes.get(name, Count()), row)
        for model, mark in answer.marks.items():
            before = marks.get(model, mark)
            marks[model] = max(before, mark, key=lambda each: each.watermark)
    names = in_order(rows, by)
    return InIngress(len(answers), total, {n: rows[n] for n in names}, rest, classes, marks)


def forces_of(workers: Iterable[WorkerEntry], found: InIngress) -> dict[str, Force]:
    """Return what serves each model that has a live worker or that a node has heard of."""
    takers = [worker for worker in workers if not worker.draining]
    slots: dict[str, list[int]] = {model: [] for model in found.marks}
    for worker in takers:
        slots.setdefault(worker.model, []).append(worker.slots)
    return {
        model: Force(
            len(of_model),
            sum(of_model),
            found.marks[model].watermark if model in found.marks else None,
        )
        for model, of_model in sorted(slots.items())
    }


def forces_as_json(forces: Mapping[str, Force]) -> list[dict[str, Any]]:
    """Return the member `models` of `--json`."""
    return [{"model": model, **force._asdict()} for model, force in forces.items()]


def table(found: InIngress, by: By) -> list[str]:
    """Return what waits in ingress as lines of text."""
    if not found.nodes:
        return ["", NO_ANSWER]
    body = [(printable(name), row) for name, row in found.rows.items()]
    if found.rest.waiting:
        body.append((OTHERS, found.rest))
    body.append(("total", found.total))
    width = max(len(name) for name, _ in [*body, (by.value, None)])
    nodes = "1 node" if found.nodes == 1 else f"{found.nodes} nodes"
    classes = ", ".join(f"{name} {row.waiting}" for name, row in found.classes.items())
    return [
        "",
        f"waiting in ingress, not yet in the queue ({nodes} answered)",
        f"{by.value.upper():<{width}} {'WAITING':>9} {'OLDEST':>10} {'KIB':>9} {'ARRIVAL/S':>9}"
        f" {'DRAIN/S':>9}  OLDEST ID",
        *[
            f"{name:<{width}} {row.waiting:>9} {row.oldest_age_s:>8.1f} s"
            f" {row.prompt_bytes / 1024:>9.1f} {row.arrival_per_s:>9.1f} {row.drain_per_s:>9.1f}"
            f"  {printable(row.oldest or '-')}"
            for name, row in body
        ],
        f"by class: {classes}",
    ]


def forces_table(forces: Mapping[str, Force]) -> list[str]:
    """Return what serves each model as lines of text; nothing where there is no model."""
    if not forces:
        return []
    width = max(len(printable(model)) for model in [*forces, "MODEL"])
    return [
        "",
        f"{'MODEL':<{width}} {'WORKERS':>9} {'SLOTS':>9} {'WATERMARK':>11}",
        *[
            f"{printable(model):<{width}} {force.workers:>9} {force.slots:>9}"
            f" {'?' if force.watermark is None else force.watermark:>11}"
            for model, force in forces.items()
        ],
    ]


def place_as_json(request: str, node: str, place: Place) -> dict[str, Any]:
    """Return what `peek --json` prints of a request that waits in ingress."""
    return {
        "id": request,
        "state": "waiting_in_ingress",
        "node": node,
        "lane": place.lane,
        "model": place.model,
        "partition": str(place.partition),
        "tenant": place.tenant,
        "class": place.priority_class,
        "age_s": place.age_s,
        "gives_up_in_s": place.gives_up_in_s,
        "prompt_bytes": place.prompt_bytes,
        "ahead": place.ahead,
        "queued": place.mark.queued,
        "watermark": place.mark.watermark,
        "slots": place.mark.slots,
        "reply": None,
    }


def place_lines(request: str, node: str, place: Place) -> list[str]:
    """Return the same as lines of text, and why it waits."""
    known = place_as_json(request, node, place)
    return [
        *[
            f"{name:<16} {printable(str(value))}"
            for name, value in known.items()
            if name != "reply"
        ],
        f"{'why':<16} {_why(place)}",
    ]


def _why(place: Place) -> str:
    mark = place.mark
    if not mark.slots:
        limit = f"no live worker serves the model, and the watermark is {mark.watermark} then"
    else:
        limit = f"the watermark of {mark.slots} live slots is {mark.watermark}"
    if mark.queued < mark.watermark:
        return f"it is about to be let go: {mark.queued} are queued, {limit}"
    return f"{mark.queued} of the model's requests are queued or run; {limit}"


def _plain(row: Count) -> dict[str, Any]:
    return msgspec.structs.asdict(row)
