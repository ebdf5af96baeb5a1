"""Recording: call to span to journal to ledger, durable before the answer's last byte."""
