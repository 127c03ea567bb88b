"""Text in and text out: tokeniser, templates, detokeniser, stop window, tool syntax, grammar masks. Knows no engine."""
