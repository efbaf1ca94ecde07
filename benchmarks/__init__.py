"""What README's figures come from. Each is a module with `main()`; `python -m benchmarks` runs them in turn."""
