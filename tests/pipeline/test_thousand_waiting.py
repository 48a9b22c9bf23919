"""Tenant A has a thousand queued, B sends one at a time: each waits about one service time.

The house is this test's alone: forecasts of waits remember the crowd for a while.
"""

import asyncio
from pathlib import Path

import pytest

from tests.pipeline.conftest import Mode
from tests.pipeline.metered import metered
from tests.pipeline.test_saturation import SLOTS, crowd, crowded, usual

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("mode", ["gateway"], indirect=True, scope="session"),
]

LOUD = 1000


def test_a_quiet_tenant_waits_about_one_service_time_behind_a_loud_ones_1000(
    mode: Mode, tmp_path: Path
) -> None:
    async def run() -> list[int]:
        between = []
        async with crowd(house) as clients:
            await crowded(house, clients, loud=LOUD)
            for _ in range(20):
                before = len(clients.answered)
                assert (await clients.ask("quiet")).status_code == 200
                between.append(len(clients.answered) - before - 1)
        return between

    models = {"pair": f'{{"max_num_seqs": {SLOTS}}}'}
    tenants = {"free": "", "loud": "", "quiet": ""}
    # The last of a thousand would wait for 75 s: without patience it would be refused at once.
    patience = ("--queue-patience-s", "200")
    with metered(mode, tmp_path, tenants=tenants, models=models, last=patience) as house:
        between = asyncio.run(run())
    assert usual(between) <= 3 * SLOTS
