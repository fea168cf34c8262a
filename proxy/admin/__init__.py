"""The admin listener and its client. Operators use it; no client of the proxy does."""
