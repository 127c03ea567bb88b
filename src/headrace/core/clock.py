"""Where time comes from. Everything that decides takes `now_s` as an argument; only loops own a clock."""

import time


class SystemClock:
    """Monotonic seconds of this machine."""

    now_s = staticmethod(time.monotonic)
