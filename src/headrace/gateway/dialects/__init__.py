"""How the HTTP face words a stream: server-sent events from records, and whole bodies from all of them. Pure."""
