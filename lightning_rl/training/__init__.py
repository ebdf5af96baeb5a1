"""Rows -> tensors -> an optimizer step -> a checkpoint."""
