"""Binds the two listening sockets before anything else starts, so that a port in use is reported at once."""

from __future__ import annotations

import socket

from pagemill_gateway.config import GatewayConfig, SettingsError
from pagemill_gateway.discovery.catalog import check_catalog
from pagemill_gateway.logs import log_event
from pagemill_protocol.errors import PagemillError
from pagemill_servers.process.listening import bind_both, url_of
from pagemill_servers.tls.certificates import EngineTrust, ServerTLS, TLSError


def open_ports(config: GatewayConfig) -> tuple[socket.socket, socket.socket]:
    """Bind the data and the control port. Raises `SettingsError`, also for an invalid catalogue or certificate."""
    try:
        if config.tls is not None:
            ServerTLS(config.tls)
        EngineTrust(config.engine_tls.ca_file)
    except TLSError as error:
        raise SettingsError(str(error)) from error
    try:
        check_catalog(config.catalog)
    except PagemillError as error:
        raise SettingsError(f"catalog: {error.message}") from error
    return bind_both(config.host, config.port, config.control_host, config.control_port)


def log_listening(config: GatewayConfig, data_socket: socket.socket, control_socket: socket.socket) -> None:
    """Log the URLs of the gateway, and the file of its control token if there is one."""
    file = {"control_token_file": config.control_token_file} if config.control_token_file is not None else {}
    scheme = "http" if config.tls is None else "https"
    log_event("listening", url=url_of(data_socket, scheme), control_url=url_of(control_socket), **file)
