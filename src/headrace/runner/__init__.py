"""What computes plans: `fake` needs numpy only, `torch` runs models on CPUs, `cuda` on NVIDIA cards."""
