"""The scheduler and its state: pure decisions over tokens, slots and blocks. No torch, I/O, clock or telemetry."""
