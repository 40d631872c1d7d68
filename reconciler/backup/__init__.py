"""One file with all that a site cannot do without, and a site made of it again."""
