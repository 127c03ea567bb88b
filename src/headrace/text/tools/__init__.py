"""Tool calls in generated text: events, a scanner of JSON, one call, the syntaxes. Knows no model and no protocol."""
