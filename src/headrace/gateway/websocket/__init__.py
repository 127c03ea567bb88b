"""The WebSocket face: several streams over one connection, each with a window that the client moves."""
