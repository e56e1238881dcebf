"""Downloads public datasets from a hub to a plain folder, whole or up to a limit, and records their origin."""
