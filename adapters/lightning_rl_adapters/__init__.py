"""What a trace means: spans -> calls -> forest -> rows and triplets. Pure data: no network, no torch."""
