"""The journal in Redis as a gateway opens it. Owns the client's limits, and whose streams it shares.

All gateways of one server share their streams; another server in the same Redis, or the next one after a restart, has
another secret and other keys.
"""

from hashlib import blake2b

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from headrace.control.orders import Orders
from headrace.streams.redis_journal import RedisJournal

# Above the time for which a reader waits in Redis.
_ANSWER_S = 2.0
_CONNECT_S = 1.0


def open_redis(orders: Orders, index: int) -> RedisJournal:
    """Connects when it is first used. A gateway of the same index that comes later takes over from this one."""
    config = orders.config.gateway
    client = Redis.from_url(
        config.journal,
        socket_timeout=_ANSWER_S,
        socket_connect_timeout=_CONNECT_S,
        # One more: a connection of before a restart of Redis is found broken when it is used.
        retry=Retry(NoBackoff(), 1),
        protocol=2,
    )
    server = blake2b(orders.secret, digest_size=8, person=b"headrace").hexdigest()
    return RedisJournal(
        client,
        orders.secret,
        f"g{index}",
        window_s=config.resume_s,
        prefix=f"headrace:{server}:",
        max_bytes=config.resume_bytes // config.processes,
    )
