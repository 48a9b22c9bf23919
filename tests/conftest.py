"""What all tests share: where HEADRACE_NO_SKIP is set, a skip is a failure."""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.servers import NatsServer

NO_SKIP = os.environ.get("HEADRACE_NO_SKIP") == "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if NO_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped where no skip is allowed: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if NO_SKIP and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped where no skip is allowed: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A nats-server for all tests that do not stop it; each makes streams of its own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server.url
    server.stop()


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server for one test, running, to be stopped and started."""
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.stop()
