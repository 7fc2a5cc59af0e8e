"""Where configs are kept and how one is selected."""
