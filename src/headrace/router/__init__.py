"""Which replica takes a request. Decides; submits nothing."""
