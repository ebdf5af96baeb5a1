"""Layers of a model that are computed otherwise than the model does, with the same results: attention, output layer."""
