"""What the prefix cache does for its users: live reports, and simulation over recorded traces."""
