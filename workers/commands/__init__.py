"""The commands of the workers' half of the program, and how a command is run."""
