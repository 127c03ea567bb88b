"""Who may ask: tenants and their keys."""
