"""`headrace serve` with gRPC: its port is known to be free before anything starts, and is shown."""

import socket

import pytest

from headrace.cli.announcement import reachable_at, ready_lines, served_models
from headrace.cli.keys import LocalKey
from headrace.cli.serve import reserve
from headrace.core.config import Config, GatewayConfig, ModelConfig, check_config
from headrace.core.errors import HeadraceError, InvalidInput


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def test_a_port_that_is_taken_is_said_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HeadraceError, match=f"cannot listen on 127.0.0.1:{port}: .*; --grpc-port takes another"):
            reserve(GatewayConfig(grpc_port=port))


def test_a_port_that_another_shares_is_taken_too() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken, pytest.raises(HeadraceError):
        reserve(GatewayConfig(grpc_port=taken.getsockname()[1]))


def test_a_port_that_is_kept_is_the_gateways_to_share() -> None:
    port = free_port()
    with reserve(GatewayConfig(grpc_port=port)), socket.socket() as gateways:
        gateways.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        gateways.bind(("127.0.0.1", port))
        gateways.listen()
        socket.create_connection(("127.0.0.1", port)).close()


def test_one_port_is_not_for_both() -> None:
    with pytest.raises(InvalidInput) as refused:
        reserve(GatewayConfig(port=4711, grpc_port=4711))
    assert refused.value.param == "--grpc-port"


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="grpc_port"):
        check_config(Config(gateway=GatewayConfig(grpc_port=65536)))


@pytest.mark.parametrize(
    ("gateway", "shown"),
    [
        (GatewayConfig(), None),
        (GatewayConfig(grpc_port=9000), "127.0.0.1:9000"),
        (GatewayConfig(host="::", grpc_port=9000), "[::1]:9000"),
    ],
)
def test_where_it_listens_is_shown(gateway: GatewayConfig, shown: str | None) -> None:
    address = reachable_at(gateway, 8080)
    assert address.grpc == shown
    models = served_models([ModelConfig("a")], [])
    lines = ready_lines(address, LocalKey("hr-key", "$KEY", None), models, 1.0, show_key=False)
    assert [line.split() for line in lines if line.startswith("  grpc")] == ([["grpc", shown]] if shown else [])
