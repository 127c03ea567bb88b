"""A request's life, once, whatever face it came through: prepared, generated, spoken."""
