"""What the control plane does at gateways, this server's own and those of other servers of the store."""
