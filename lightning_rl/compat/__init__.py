"""Other projects' forms of use: Agent-lightning's class form and daemon mode, verl's agent-loop sessions."""
