"""What the system keeps of this process's memory."""

import re
from pathlib import Path

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


def mapping_flags(address: int) -> set[str]:
    """Of the mapping that the address lies in; "hg" is a wish for large pages."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := _MAPPING.match(line):
            is_inside = int(found[1], 16) <= address < int(found[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:#x}")
