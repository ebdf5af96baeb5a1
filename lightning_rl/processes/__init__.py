"""Processes of ours: started, watched, ended with their parent; what they know of this machine."""
