"""Bodies that HTTP clients send and get: fields, types, bounds, and what they ask of the service."""
