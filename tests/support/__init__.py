"""What several tests share and no user needs."""
