"""Pure numerics: advantages, losses, aggregation. No model, no IO."""
