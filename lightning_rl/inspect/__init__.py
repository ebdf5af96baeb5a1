"""What a run recorded, read by people: its conversations as trees, their forks, their rows."""
