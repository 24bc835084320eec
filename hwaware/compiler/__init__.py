"""Make the programs of a pipeline's stages as StableHLO text: split over devices, by replica, by layer."""
