"""Tuning: the search among candidates, the processes that run them, and their timers."""
