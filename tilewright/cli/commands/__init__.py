"""The commands as they are typed: arguments and help. Their work is imported when they are called."""
