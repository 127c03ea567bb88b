"""The virtual world: the real engine under a virtual clock, seeded load, and the planner beside it."""
