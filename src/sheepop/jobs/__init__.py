"""What each command does, as plain functions: configuration in, result out."""
