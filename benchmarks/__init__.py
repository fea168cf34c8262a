"""What warmfold costs and what it saves, measured on this machine. Each module is a command: `python -m benchmarks.NAME`; see docs/benchmarks.md."""
