"""Stages that judge or change one document at a time, chosen and ordered by the configuration."""
