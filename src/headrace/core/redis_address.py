"""The address of a Redis as a configuration says it. Owns what may be said; opens no connection.

A password may be in it: no message here repeats any part of the address but where it leads.
"""

import ipaddress
from urllib.parse import parse_qsl, urlsplit

from headrace.core.errors import InvalidInput

SCHEMES = ("redis", "rediss", "unix")
# What may follow the question mark. Others could switch the check of certificates off.
_OPTIONS = frozenset({"db", "username", "password", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})


def is_redis(address: str) -> bool:
    return address.partition("://")[0] in SCHEMES and "://" in address


def check_redis(address: str, param: str) -> None:
    """InvalidInput where no client could use it, and where a password or a stream would cross a network in the clear."""
    try:
        parts = urlsplit(address)
        host, _, options = (
            parts.hostname or "",
            parts.port,
            dict(parse_qsl(parts.query, strict_parsing=bool(parts.query))),
        )
    except ValueError:
        raise InvalidInput(f"{param} is no address of a Redis", param=param) from None
    unknown = sorted(options.keys() - _OPTIONS)
    if not options.get("db", "0").isdecimal():
        raise InvalidInput(f"{param}: db is the number of a database", param=param)
    if unknown:
        raise InvalidInput(f"{param}: an address of a Redis may say {', '.join(sorted(_OPTIONS))} only", param=param)
    if parts.scheme == "unix":
        if not parts.path:
            raise InvalidInput(f"{param} must name the path of a socket: unix:///run/redis.sock", param=param)
        return
    number = parts.path.removeprefix("/")
    if parts.fragment or (number and not number.isdecimal()):
        what = "after the host comes the number of a database; a password's @, / and # are %40, %2F and %23"
        raise InvalidInput(f"{param}: {what}", param=param)
    if not is_loopback(host or "localhost"):
        has_password = bool(parts.password or options.get("password"))
        if parts.scheme != "rediss" or not has_password:
            message = f"{param}: a Redis on another machine needs a password and TLS (rediss://:PASSWORD@HOST)"
            raise InvalidInput(message, param=param)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def redis_place(address: str) -> str:
    """Where a client finds it, and nothing that opens it."""
    parts = urlsplit(address)
    host = parts.hostname or "localhost"
    return parts.path if parts.scheme == "unix" else f"{f'[{host}]' if ':' in host else host}:{parts.port or 6379}"
