"""Measure, on a connected cluster, what the price of a model needs beside the profile of devices and links.

    layers        times of a model's layers on the devices, within a limit, with a cache on disk
    runtime_part  what the runtime takes beside programs and network: passes, sums of gradients

Both return their records with the measured figures, which `hwaware.costs` prices.
"""
