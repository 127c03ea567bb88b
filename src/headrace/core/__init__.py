"""Types that cross a boundary, errors, ports, clock and stages; knows no other package."""
