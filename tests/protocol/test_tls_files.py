"""Certificates from files: unusable ones are refused at the start and ignored when they change later."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from certificates import write_certificate

from pagemill_servers.tls import certificates as tls_module
from pagemill_servers.tls.certificates import EngineTrust, ServerTLS, TLSError
from pagemill_servers.tls.config import TLSConfig


def test_certificate_and_key_that_do_not_match_are_refused_at_the_start_and_ignored_later(tmp_path: Path) -> None:
    cert_file, key_file = write_certificate(tmp_path)
    config = TLSConfig(cert_file=cert_file, key_file=key_file)
    served = ServerTLS(config)
    key = Path(config.key_file)
    before, fitting = tls_module._load, key.read_bytes()
    loaded: list[ssl.SSLContext] = []
    key.write_bytes(b"no key")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tls_module, "_load", lambda context, config: (before(context, config), loaded.append(context)))
        served.refresh()
        assert loaded == [], "only one of the two files has changed"
        key.write_bytes(fitting)
        served.refresh()
        assert loaded[-1] is served.context
    key.write_bytes(b"no key")
    with pytest.raises(TLSError, match="cannot be used"):
        ServerTLS(config)
    key.unlink()
    with pytest.raises(TLSError, match="No such file"):
        ServerTLS(config)


def handshake(server: ssl.SSLContext, trust: EngineTrust, host: str = "10.0.0.1") -> str:
    """Return the certificate that the client accepted, or the error, from a handshake in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    accepting = server.wrap_bio(to_server, to_client, server_side=True)
    asking = trust.wrap_bio(to_client, to_server, server_hostname=host)
    for _ in range(5):
        for side in (asking, accepting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    return ssl.DER_cert_to_PEM_cert(asking.getpeercert(binary_form=True) or b"")


def test_the_authority_and_name_of_engines_are_verified_and_may_change(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    cert_file, key_file = write_certificate(tmp_path, "engines.test")
    server = ServerTLS(TLSConfig(cert_file=cert_file, key_file=key_file)).context
    ca_file = other / "ca.crt"
    ca_file.write_text(Path(write_certificate(other)[0]).read_text())
    trust = EngineTrust(str(ca_file), "engines.test")
    assert "self-signed" in handshake(server, trust), "the certificate is from another authority"
    ca_file.write_text(Path(cert_file).read_text())
    assert handshake(server, trust) == Path(cert_file).read_text()
    assert handshake(server, EngineTrust(str(ca_file)), "127.0.0.1") == Path(cert_file).read_text()
    assert "not valid for '10.0.0.1'" in handshake(server, EngineTrust(str(ca_file)))
    ca_file.write_text("half of a file")
    assert handshake(server, trust) == Path(cert_file).read_text(), "the previous authorities must remain"
    with pytest.raises(TLSError, match=r"engine_tls.ca_file: .* cannot be used"):
        EngineTrust(str(ca_file))
    assert "self-signed" in handshake(server, EngineTrust()), "the authorities of this machine apply"
