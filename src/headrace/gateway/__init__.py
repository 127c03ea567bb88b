"""The HTTP face: routes with authentication inside, schemas, dialects, streams to clients, pages."""
