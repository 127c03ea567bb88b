"""A model's files: read, checked, hashed and fetched as data. No torch, no pickle, no code from a model."""
