"""Where a server listens is said by its user: an empty address is not every address, and no port is a crash."""

import errno
import os

import pytest

from pasta_otel.app.agent_start import AgentOptions
from pasta_otel.errors import InputError, MissingError
from pasta_otel.exporters.api.server import ApiServer


async def nothing(*_: object) -> None: ...


@pytest.mark.parametrize("host", ["", " ", "\t"])
def test_an_empty_address_is_refused(host):
    for make in (lambda: ApiServer(nothing, host=host, port=0), lambda: AgentOptions(host=host).checked()):
        with pytest.raises(InputError) as refused:
            make()
        assert refused.value.field == "--host"


@pytest.mark.parametrize("port", [-1, 65_536, 99_999, 1 << 40])
def test_an_impossible_port_is_refused(port):
    for make in (lambda: ApiServer(nothing, port=port), lambda: AgentOptions(port=port).checked()):
        with pytest.raises(InputError) as refused:
            make()
        assert refused.value.field == "--port"


@pytest.mark.parametrize("host", ["x" * 70, "ä" * 70, "a\x00b", "127.0.0.1:80"])
def test_an_address_that_is_none_is_said_in_one_line(host):
    with pytest.raises(MissingError, match="cannot listen on"):
        ApiServer(nothing, host=host, port=0).start()


def test_a_server_that_cannot_run_says_why(monkeypatch):
    def fail(**_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    server = ApiServer(nothing, port=0)
    monkeypatch.setattr(server._server, "run", fail)
    with pytest.raises(MissingError, match=r"did not start: .*Too many open files"):
        server.start()
