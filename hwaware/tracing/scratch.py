"""Scratch memory of backward programs, which a trace does not show: a figure from measured programs."""

# Scratch of a backward program over the activations that it reads, beside the gradients of its parameters: 0.36 to 0.42
# for GPT blocks and 0.39 to 0.42 for several dense layers on XLA's CPU back end (jax 0.4.30); up to 0.8 for one dense
# layer alone. With rematerialisation it is too low: what is computed again is not among the activations.
SCRATCH_PER_ACTIVATION = 0.4
