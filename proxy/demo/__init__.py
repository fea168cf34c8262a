"""A provider made for tests, benchmarks and `warmfold demo`: it counts, caches and refuses as real ones do, and only its wit is simulated."""
