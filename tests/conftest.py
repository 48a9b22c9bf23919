"""What all tests share: where HEADRACE_NO_SKIP is set, a skip is a failure; how they are divided
among processes; and that no example of Hypothesis is timed."""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.servers import NatsServer

NO_SKIP = os.environ.get("HEADRACE_NO_SKIP") == "1"

settings.register_profile("ours", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Name the group of each test: a group's tests run in one process, one after another.

    A file is a group, since its servers are started once; so is half of the files that ask a
    system in one of its two forms, whose start takes longer than most of them.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    halves: dict[Path, int] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        mode = None if callspec is None else callspec.params.get("mode")
        if mode is None:
            group = item.path.stem
        else:
            group = f"{mode} {halves.setdefault(item.path, len(halves)) % 2}"
        item.add_marker(pytest.mark.xdist_group(group))


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
