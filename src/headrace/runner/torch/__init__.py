"""Models on torch: the only package that imports it."""
