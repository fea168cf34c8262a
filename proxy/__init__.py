"""warmfold: a caching reverse proxy that compacts long conversations by replaying the warm request."""

__version__ = "0.1.0"
