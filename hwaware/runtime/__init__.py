"""Run Alpa pipeline stages on stock JAX, with a worker that takes the place of Alpa's."""
