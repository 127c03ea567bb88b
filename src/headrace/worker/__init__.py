"""One process's work: an engine over a runner, loaded, warmed up and measured."""
