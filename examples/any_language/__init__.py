"""An agent in plain shell and curl, trained and recorded like any other."""
