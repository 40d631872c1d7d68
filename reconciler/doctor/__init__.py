"""What is wrong with an installation: looks only, changes nothing, needs no service."""
