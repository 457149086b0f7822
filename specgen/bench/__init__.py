"""Measuring attention: workloads, batches and timing, shared by `specgen bench` and `specgen tune`; peers and reports."""
