"""The commands as they are typed: arguments and help; what they do is imported when they are called."""
