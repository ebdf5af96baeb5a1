"""One file a dialect: wire <-> internal, pure translation without IO."""
