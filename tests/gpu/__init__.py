"""What is to be seen on a machine with a GPU: `make test-gpu` runs it part by part, and writes `gpu-report.md`."""
