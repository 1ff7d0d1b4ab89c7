"""Instructions that the host spends on a step, without what it computes: docs/host_cost.md."""
