"""Invalid HTTP requests for every port: broken framing, and headers that have a meaning for some servers."""

from __future__ import annotations

from hypothesis import strategies as st

FORBIDDEN = {
    "a length and chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    "the same length twice": b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": b"Content-Length: 2, 2\r\n\r\n{}",
    "a negative length": b"Content-Length: -1\r\n\r\n{}",
    "a signed length": b"Content-Length: +2\r\n\r\n{}",
    "a hexadecimal length": b"Content-Length: 0x2\r\n\r\n{}",
    "a length of 23 digits": b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "an unknown coding": b"Transfer-Encoding: gzip\r\n\r\n{}",
    "chunks inside another coding": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "almost chunked": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a folded header": b"X-A: b\r\n Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    "a bare carriage return": b"X-A: b\rTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    "bare line feeds": b"X-A: b\nContent-Length: 2\n\n{}",
    "a NUL in a header": b"X-A: a\0b\r\nContent-Length: 2\r\n\r\n{}",
    "a header without a name": b": b\r\nContent-Length: 2\r\n\r\n{}",
    "a name with a blank": b"X A: b\r\nContent-Length: 2\r\n\r\n{}",
    "a chunk size of letters": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a chunk size beyond 64 bits": b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}",
    "a negative chunk size": b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}",
    "a chunk longer than its size": b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}}\r\n0\r\n\r\n",
    "chunks with bare line feeds": b"Transfer-Encoding: chunked\r\n\r\n2\n{}\n0\n\n",
}
"""Bytes after the first lines of a request, by their error: two parsers could interpret them differently."""
NAMES = (
    b"Authorization Content-Type X-Request-Id X-Request-Timeout-S Expect Host Accept-Encoding Content-Encoding Cookie "
    b"Connection Keep-Alive Upgrade TE Transfer-Encoding Content-Length X-Forwarded-For Range X-Pagemill-Gateway"
).split()
VALUES = [b"", b"chunked", b"close", b"100-continue", b"gzip", b"identity", b"nan", b"inf", b"1e400", b"0", b"-1"]
VALUES += [b"Bearer ", b"Bearer x", b"application/json", b"text/plain"]
HEADER = st.tuples(
    st.sampled_from(NAMES),
    st.one_of(st.sampled_from(VALUES), st.binary(max_size=40).filter(lambda value: not set(value) & set(b"\r\n"))),
)
"""One header, with a valid or an invalid value."""
