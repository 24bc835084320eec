"""Run Alpa pipeline stages on stock JAX: the worker that takes the place of Alpa's, and what it needs to run a step."""
