"""Training by several processes: Ray places them, FSDP2 shards the models, each computes a share of the rows."""
